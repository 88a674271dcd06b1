"""Placing, with waits between look-up, queue and booking. The test owns the clock."""

import asyncio
from random import Random
from typing import Any

import pytest
from blockyard.proto.index.contract import Batch, Berth, Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import EngineLink
from blockyard.router.dispatch.placer import Placer
from blockyard.router.dispatch.prefix_lookup import PrefixLookup
from blockyard.router.errors import DeadlineUnreachable
from blockyard.router.placement.config import PlacementConfig

from .prompt import NAMES, PROMPT_TOKENS, Clock


def fleet_of(clock: Clock, names: str = "a") -> Fleet:
    fleet = Fleet(tokenizer_fingerprint="t", suspect_seconds=10.0, lost_seconds=20.0, clock=clock)
    kind = {"tokenizer_fingerprint": "t", "block_size": 16, "total_blocks": 1000}
    kind |= {"max_model_len": 1000, "vocab_size": 1000}
    for name in names:
        fleet.links[name] = EngineLink(name, fleet, lost_seconds=20.0, clock=clock)
        assert fleet.accept(name, session_pb2.Hello(worker_id=name, incarnation=f"{name}1", **kind)) is None
    return fleet


async def register(index: TwinPrefixIndex) -> Berth:
    known = {"address": "a", "fingerprint": "model", "block_size": 16}
    record = WorkerRecord(worker_id=WorkerId("a"), incarnation=Incarnation("a1"), **known)
    return await index.register(record, lease_seconds=600.0, has_host_cache=True)


def placer_of(fleet: Fleet, index: TwinPrefixIndex | None, clock: Clock, **settings: Any) -> Placer:
    lookup = None if index is None else PrefixLookup(index)
    given = {"policy": "prefix", "no_worker_seconds": 5.0, "rng": Random(0)} | settings
    return Placer(fleet, lookup, clock=clock, **given)


def placing(placer: Placer) -> "asyncio.Task[Placed]":
    return asyncio.create_task(placer.place(NAMES, PROMPT_TOKENS, placer.ticket()))


async def test_what_comes_from_host_memory_is_booked_as_blocks_and_not_as_prefill() -> None:
    clock = Clock()
    fleet, index = fleet_of(clock), TwinPrefixIndex(clock)
    berth = await register(index)
    batch = Batch(sequence=1, added=tuple(NAMES[:8]), anywhere_added=tuple(NAMES[:20]))
    await index.apply(berth, batch)
    fleet.heard("a", cluster_pb2.WorkerLoad(host_tokens_per_second=1e6))
    placer = placer_of(fleet, index, clock)
    placement, _ = await placer.explain(NAMES, PROMPT_TOKENS)
    assert placement is not None
    assert (placement.chosen.cached_tokens, placement.chosen.host_cached_tokens) == (128, 192)
    placed = await placer.place(NAMES, PROMPT_TOKENS, placer.ticket())
    assert (placed.uncached_tokens, placed.blocks) == (PROMPT_TOKENS - 20 * 16, 23)


async def test_the_index_promises_and_speculation_does_not() -> None:
    clock = Clock()
    fleet, index = fleet_of(clock), TwinPrefixIndex(clock)
    batch = Batch(sequence=1, added=tuple(NAMES[:8]), anywhere_added=tuple(NAMES[:20]))
    await index.apply(await register(index), batch)
    placer = placer_of(fleet, index, clock)
    first, second = [await placer.place(NAMES, PROMPT_TOKENS, placer.ticket()) for _ in range(2)]
    assert (first.promised_blocks, second.promised_blocks) == (20, 20)
    assert second.uncached_tokens < first.uncached_tokens, "it was placed on what the first will store"
    whole = await placer.place(NAMES[:20], 20 * 16, placer.ticket())
    assert whole.promised_blocks == 19, "the last prompt token is computed whatever is cached"


async def test_a_sessions_next_request_goes_where_its_last_one_went() -> None:
    clock = Clock()
    fleet = fleet_of(clock, "abcdefgh")
    placer = placer_of(fleet, TwinPrefixIndex(clock), clock)

    async def winners(session_id: str) -> list[str]:
        addresses = []
        for _ in range(10):
            placed = await placer.place([], 100, placer.ticket(), session_id=session_id)
            addresses.append(placed.address)
            placer.ended(placed)
        return addresses

    assert len(set(await winners(""))) > 3, "equals share"
    first, second = set(await winners("first")), set(await winners("second"))
    assert len(first) == len(second) == 1
    explained, _ = await placer.explain([], 100, session_id="first")
    assert explained is not None
    assert {explained.chosen.address} == first


async def test_what_the_index_said_before_a_long_wait_in_line_is_asked_again() -> None:
    clock = Clock()
    fleet, index = fleet_of(clock, "ab"), TwinPrefixIndex(clock)
    berth = await register(index)
    placer = placer_of(fleet, index, clock)
    for address in "ab":
        shut(fleet, address)
    fleet.heard("a", cluster_pb2.WorkerLoad(queued_prefill_tokens=100))
    waiting = placing(placer)
    await asyncio.sleep(0.02)
    assert [len(worker.booked) for worker in fleet.view.workers()] == [0, 1], "b had less to do"
    await index.apply(berth, Batch(sequence=1, added=tuple(NAMES[:8])))
    clock.now += PlacementConfig().stale_lookup_seconds * 1.1
    for address in "ab":
        fleet.heard(address, None)
    await asyncio.sleep(0.2)
    assert [len(worker.booked) for worker in fleet.view.workers()] == [1, 0], "a has the prefix now"
    open_up(fleet, "a")
    placed = await waiting
    assert (placed.address, placed.uncached_tokens) == ("a", PROMPT_TOKENS - 8 * 16)


async def test_a_request_waits_for_its_prefix_rather_than_go_wherever_there_is_room() -> None:
    clock = Clock()
    fleet, index = fleet_of(clock, "ab"), TwinPrefixIndex(clock)
    await index.apply(await register(index), Batch(sequence=1, added=tuple(NAMES)))
    placer = placer_of(fleet, index, clock)
    shut(fleet, "a")
    waiting = placing(placer)
    await asyncio.sleep(0.02)
    assert not waiting.done()
    other = await placer.place([], 100, placer.ticket())
    assert other.address == "b", "who waits for one worker holds nobody up who goes to another"
    open_up(fleet, "a")
    assert (await waiting).address == "a"
    fleet.view.check_invariants()


async def test_who_waits_goes_elsewhere_once_that_is_cheaper_and_a_cancelled_one_leaves_nothing() -> None:
    clock = Clock()
    fleet, index = fleet_of(clock, "ab"), TwinPrefixIndex(clock)
    await index.apply(await register(index), Batch(sequence=1, added=tuple(NAMES)))
    placer = placer_of(fleet, index, clock)
    shut(fleet, "a")
    first, second = placing(placer), placing(placer)
    await asyncio.sleep(0.02)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    clock.now += PlacementConfig().reconsider_seconds * 1.1
    fleet.heard("b", None)
    fleet.heard("a", measured_load(queued_prefill_tokens=10**6))
    assert (await first).address == "b"
    assert not placer._lines
    for worker in fleet.view.workers():
        assert len(worker.booked) == (worker.address == "b")
    fleet.view.check_invariants()


def shut(fleet: Fleet, address: str) -> None:
    worker = fleet.view.at(address)
    assert worker is not None
    worker.gate.shut(1e6)


def open_up(fleet: Fleet, address: str) -> None:
    worker = fleet.view.at(address)
    assert worker is not None
    worker.gate.freed_one()
    fleet.heard(address, None)


def measured_load(*, queued_prefill_tokens: int) -> cluster_pb2.WorkerLoad:
    """A load report of a worker that has computed 1,000 prompt tokens in a second."""
    steps = {"step_seconds": 1.0, "steps": 1, "prompt_steps": 1, "step_prompt_tokens": 1_000}
    return cluster_pb2.WorkerLoad(queued_prefill_tokens=queued_prefill_tokens, **steps)


async def test_a_deadline_that_cannot_be_met_by_far_is_refused_at_once_and_books_nothing() -> None:
    clock = Clock()
    fleet = fleet_of(clock, "ab")
    for name, queued_tokens in (("a", 9_000), ("b", 40_000)):
        fleet.heard(name, measured_load(queued_prefill_tokens=queued_tokens))
    placer = placer_of(fleet, None, clock, policy="least_loaded")
    placement, _ = await placer.explain([], PROMPT_TOKENS)
    assert placement is not None
    seconds = min(score.queue_ms + score.prefill_ms for score in placement.scores) / 1_000
    assert seconds > 1.0
    with pytest.raises(DeadlineUnreachable):
        await placer.place([], PROMPT_TOKENS, placer.ticket(), deadline=clock.now + seconds / 2.1)
    assert not any(len(worker.booked) for worker in fleet.view.workers())
    placed = await placer.place([], PROMPT_TOKENS, placer.ticket(), deadline=clock.now + seconds / 1.9)
    assert placed.address == "a"


async def test_no_deadline_is_hopeless_before_anything_was_measured_or_where_it_is_switched_off() -> None:
    clock = Clock()
    fleet = fleet_of(clock)
    fleet.heard("a", cluster_pb2.WorkerLoad(queued_prefill_tokens=10**9))
    placer = placer_of(fleet, None, clock)
    assert await placer.place([], PROMPT_TOKENS, placer.ticket(), deadline=clock.now + 0.1)
    fleet.heard("a", measured_load(queued_prefill_tokens=10**9))
    config = PlacementConfig(hopeless_factor=0)
    patient = placer_of(fleet, None, clock, config=config)
    assert await patient.place([], PROMPT_TOKENS, patient.ticket(), deadline=clock.now + 0.1)
