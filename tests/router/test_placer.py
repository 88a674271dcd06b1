"""Placing over the waits that come between look-up, turn and booking. The clock is the test's."""

import asyncio
from random import Random

from blockyard.proto.prefix_index import Batch, Incarnation, WorkerId, WorkerRecord
from blockyard.proto.prefix_index_twin import TwinPrefixIndex
from blockyard.proto.v1 import session_pb2
from blockyard.router.engine_link import EngineLink
from blockyard.router.fleet import Fleet
from blockyard.router.placer import STALE_LOOKUP_SECONDS, Placer
from blockyard.router.prefix_index import PrefixLookup

NAMES = [bytes([number]) * 16 for number in range(30)]
PROMPT_TOKENS = 30 * 16 + 5


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fleet_of_one(clock: Clock) -> Fleet:
    fleet = Fleet(tokenizer_fingerprint="t", secret="", suspect_seconds=10.0, lost_seconds=20.0, clock=clock)
    fleet.links["a"] = EngineLink("a", fleet, secret="", lost_seconds=20.0, clock=clock)
    hello = session_pb2.Hello(
        worker_id="a",
        incarnation="a1",
        tokenizer_fingerprint="t",
        block_size=16,
        total_blocks=1000,
        max_model_len=1000,
        vocab_size=1000,
    )
    assert fleet.accept("a", hello) is None
    return fleet


async def test_what_the_index_said_before_a_long_wait_in_line_is_asked_again() -> None:
    clock = Clock()
    fleet, index = fleet_of_one(clock), TwinPrefixIndex(clock)
    record = WorkerRecord(
        worker_id=WorkerId("a"),
        incarnation=Incarnation("a1"),
        address="a",
        fingerprint="model",
        block_size=16,
    )
    berth = await index.register(record, lease_seconds=600.0)
    placer = Placer(
        fleet, PrefixLookup(index), policy="prefix", no_worker_seconds=5.0, clock=clock, rng=Random(0)
    )
    worker = fleet.view.at("a")
    assert worker is not None
    worker.gate.shut(clock.now + 100)
    placing = asyncio.create_task(placer.place(NAMES, PROMPT_TOKENS, placer.ticket()))
    await asyncio.sleep(0.02)
    assert not placing.done()
    await index.apply(berth, Batch(sequence=1, added=tuple(NAMES[:8])))
    clock.now += STALE_LOOKUP_SECONDS * 1.1
    worker.gate.freed_one()
    fleet.heard("a", None)
    assert (await placing).uncached_tokens == PROMPT_TOKENS - 8 * 16
