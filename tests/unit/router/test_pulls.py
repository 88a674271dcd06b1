"""Pulls of a router's requests: counts, times, what the log says, what is shown, and what a real stream brings."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest
from blockyard.proto.index.contract import Batch, Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.metrics.table import PULL_ENDS
from blockyard.proto.naming.block_hash import split_names
from blockyard.proto.runtime.logs import REQUEST_ID
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.dispatch.prefix_lookup import PrefixLookup, PrefixLookupConfig
from blockyard.router.generation.attempt import Progress
from blockyard.router.generation.pulls import MOST_RECENT, RECENT_SECONDS, Pulls, recent_of
from blockyard.router.placement.pulls import PullPlan, PullSource, PullVerdict
from blockyard.router.services.messages import PULL_VERDICTS, candidate_message, pull_message
from hypothesis import given
from hypothesis import strategies as st

from .fake_worker import BLOCK_SIZE, FakeWorker, Script
from .prompt import Clock
from .relay_rig import Rig, generation, rig

SOURCE_ID = WorkerId("source")
PROMPT = generation(prompt_tokens=400)
SOURCE = PullSource(WorkerId("w1"), Incarnation("life"), "here:1", "here:2", 64)
PLAN = PullPlan(source=SOURCE, num_blocks=4, num_bytes=4096, time_ms=20.0, saved_ms=300.0)
REPORTS = st.builds(
    session_pb2.PullReport,
    end=cast("st.SearchStrategy[session_pb2.PullEnd]", st.integers(0, 12)),
    num_blocks=st.integers(0, 2**32 - 1),
    num_bytes=st.integers(0, 2**64 - 1),
    setup_seconds=st.floats(),
    transfer_seconds=st.floats(),
)


def report(end: str, **numbers: float) -> session_pb2.PullReport:
    return session_pb2.PullReport(end=session_pb2.PullEnd.Value(f"PULL_END_{end.upper()}"), **numbers)


def test_there_is_a_word_for_each_end_and_a_value_for_each_verdict_on_the_wire() -> None:
    values = session_pb2.PullReport.DESCRIPTOR.fields_by_name["end"].enum_type.values
    names = {value.name.removeprefix("PULL_END_").lower() for value in values}
    assert names - {"unspecified"} == set(PULL_ENDS)
    assert set(PULL_VERDICTS) == set(PullVerdict)
    assert len(set(PULL_VERDICTS.values())) == len(PullVerdict)


def test_a_whole_pull_counts_its_blocks_bytes_times_and_the_estimated_saving_and_no_other_end_saves() -> None:
    pulls = Pulls(Clock())
    pull = pulls.begin("r", "w0", PLAN)
    brought = report("whole", num_blocks=4, num_bytes=4000, setup_seconds=0.5, transfer_seconds=0.25)
    pulls.end(pull, brought)
    pulls.end(pull, brought)  # counts once
    assert pulls.readings() == {
        "router_pulls": {"whole": 1},
        "router_pulled_blocks": 4,
        "router_pulled_bytes": 4000,
        "router_pull_saved_seconds": 0.3,
        "router_pull_setup_seconds": 0.5,
        "router_pull_transfer_seconds": 0.25,
    }
    assert pull.seconds(200.0) == 0.75
    for end in set(PULL_ENDS) - {"whole"}:
        pulls = Pulls(Clock())
        pull = pulls.begin("r", "w0", PLAN)
        pulls.end(pull, report(end, num_blocks=3, num_bytes=3000))
        readings = pulls.readings()
        assert (readings["router_pulls"], readings["router_pull_saved_seconds"]) == ({end: 1}, 0.0)
        assert (readings["router_pulled_blocks"], pull.saved_ms) == (3, 0.0)


def test_a_pull_without_a_report_is_cancelled_unless_the_request_had_its_first_token() -> None:
    pulls = Pulls(Clock())
    left, answered, late = (pulls.begin("r", "w0", PLAN) for _ in range(3))
    pulls.answered(answered)
    pulls.answered(late)
    assert pulls.recent() == [left]
    pulls.end(late, report("late", num_blocks=1))
    for pull in (left, answered, late):
        pulls.end(pull)
    assert pulls.readings()["router_pulls"] == {"cancelled": 1, "late": 1}
    assert [pull.end for pull in (left, answered, late)] == ["cancelled", "", "late"]


def test_running_pulls_are_shown_before_those_that_ended_lately_newest_first() -> None:
    clock = Clock()
    pulls = Pulls(clock)
    first, second, third = (pulls.begin("r", "w0", PLAN) for _ in range(3))
    pulls.end(second, report("whole"))
    clock.now += RECENT_SECONDS
    pulls.end(first, report("cut"))
    assert pulls.recent() == [third, first, second]
    clock.now += 1.0
    assert pulls.recent() == [third, first]


def test_pulls_of_several_models_are_shown_in_one_order_and_no_more_of_them_than_of_one() -> None:
    clock = Clock()
    models = [Pulls(clock) for _ in range(3)]
    begun = []
    for number in range(3 * MOST_RECENT):
        clock.now += 0.01
        begun.append(models[number % 3].begin("r", "w0", PLAN))
    assert recent_of(models) == begun[: -MOST_RECENT - 1 : -1]
    for number, pull in enumerate(begun):
        clock.now += 0.01
        models[number % 3].end(pull, report("whole"))
    assert recent_of(models) == begun[: -MOST_RECENT - 1 : -1]
    clock.now += 1.0
    last = models[0].begin("r", "w0", PLAN)
    assert recent_of(models)[:2] == [last, begun[-1]]


@given(st.lists(REPORTS, max_size=3 * MOST_RECENT), st.integers(0, 3 * MOST_RECENT))
def test_whatever_workers_report_counters_only_grow_and_few_pulls_are_kept(reports, num_running):
    pulls = Pulls(Clock())
    for number, told in enumerate(reports, start=1):
        before = pulls.readings()
        pulls.end(pulls.begin("r", "w0", PLAN), told)
        now = pulls.readings()
        ends = cast("dict[str, int]", now.pop("router_pulls"))
        assert set(ends) <= set(PULL_ENDS)
        assert sum(ends.values()) == number
        for name, count in cast("dict[str, float]", now).items():
            assert cast("float", before[name]) <= count < float("inf")
    for _ in range(num_running):
        pulls.begin("r", "w0", PLAN)
    assert len(pulls.recent()) <= 2 * MOST_RECENT


def test_each_end_is_one_line_of_the_log_with_workers_blocks_and_times(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    requests: list[str] = []
    caplog.handler.addFilter(lambda record: requests.append(REQUEST_ID.get()) is None)
    levels = {"corrupt": logging.WARNING} | dict.fromkeys(("whole", "cancelled", "avoided"), logging.DEBUG)
    for end in ("fewer", "refused", "unreachable", "cut", "late", *levels):
        caplog.clear()
        pulls = Pulls(Clock())
        pull = pulls.begin("r", "w0", PLAN)
        pulls.end(pull, report(end, num_blocks=3, setup_seconds=0.01, transfer_seconds=0.03))
        told = f"pull 1 of worker w0 from worker w1 ended {end}: 3 blocks, 40 ms of 20 planned"
        expected = ("blockyard.router.generation.pulls", levels.get(end, logging.INFO), told)
        assert caplog.record_tuples == [expected]
    assert set(requests) == {"r"}


def pulling_worker(name: str, script: Script, *, queued: int) -> FakeWorker:
    """A worker that measured its link and its host memory."""
    load = cluster_pb2.WorkerLoad(queued_prefill_tokens=queued, host_tokens_per_second=1e6)
    load.pull_setup_seconds, load.pull_bytes_per_second = 0.001, 1e9
    worker = FakeWorker(name, script=lambda submit: script, load=load, transfer_port=9, block_bytes=1024)
    worker.load.CopyFrom(load)
    return worker


@asynccontextmanager
async def two_workers(script: Script) -> AsyncIterator[Rig]:
    """The first one has the prompts' blocks, but is busy. The second one runs the requests by this script."""
    index = TwinPrefixIndex(time.monotonic)
    known = {"address": "anywhere", "fingerprint": "model", "block_size": BLOCK_SIZE}
    record = WorkerRecord(worker_id=SOURCE_ID, incarnation=Incarnation(f"{SOURCE_ID}-life-1"), **known)
    berth = await index.register(record, lease_seconds=600.0)
    names = split_names(PROMPT.block_names)[1:]
    await index.apply(berth, Batch(sequence=1, added=tuple(names)))
    busy, idle = (
        pulling_worker(SOURCE_ID, Script(), queued=100_000),
        pulling_worker("taker", script, queued=0),
    )
    lookup = PrefixLookup(index, config=PrefixLookupConfig(timeout_seconds=5.0))
    async with rig(busy, idle, lookup=lookup) as made:
        yield made


async def run(made: Rig) -> Progress:
    progress = Progress()
    async with asyncio.timeout(10):
        fresh = replace(PROMPT, deadline=time.monotonic() + 30)
        await made.relay.run(fresh, progress, lambda chunk: chunk.finish is not None)
    return progress


async def test_a_request_knows_its_last_pull_as_its_worker_reported_it() -> None:
    told = report("fewer", num_blocks=2, num_bytes=2048, setup_seconds=0.001, transfer_seconds=0.002)
    async with two_workers(Script(pull_report=told)) as made:
        pull = (await run(made)).pull
        source, taker = made.workers
        assert not source.submits
        assert taker.submits[0].pull.address == f"{source.address.rpartition(':')[0]}:9"
        assert pull is not None
        assert (pull.end, pull.num_blocks, pull.worker_id) == ("fewer", 2, "taker")
        assert pull.plan.source.worker_id == SOURCE_ID
        assert pull.plan.saved_ms > 10.0
        assert made.relay.pulls.recent() == [pull]
        shown = pull_message(pull, pull.began_at + 9.0)
        told = (shown.source_id, shown.end, round(shown.elapsed_ms), shown.saved_ms)
        assert told == (SOURCE_ID, "fewer", 3, 0.0)


def lending_bytes(made: Rig) -> int:
    worker = made.fleet.view.at(made.workers[0].address)
    found = worker and made.fleet.view.pull_source(worker, 1, 100)
    return found.lending_bytes if found else -1


async def cancelled(running: asyncio.Task[Progress]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_worker_that_needed_no_pull_leaves_no_trace_and_no_bytes_in_flight() -> None:
    async with two_workers(Script()) as made:
        await run(made)
        assert made.relay.pulls.recent() == []
        assert made.relay.pulls.readings()["router_pulls"] == {}
        assert lending_bytes(made) == 0


async def test_the_first_token_ends_the_bytes_in_flight_of_a_pull_that_is_not_reported() -> None:
    async with two_workers(Script(hang_after=1, step_seconds=0.5)) as made:
        running = asyncio.create_task(run(made))
        await made.until(lambda: lending_bytes(made) > 0)
        await made.until(lambda: lending_bytes(made) == 0)
        booked = made.fleet.view.at(made.workers[1].address)
        assert booked is not None
        assert booked.booked, "the request still runs"
        await cancelled(running)


async def test_a_request_that_leaves_before_its_first_token_cancels_its_pull() -> None:
    async with two_workers(Script(hang_after=0)) as made:
        running = asyncio.create_task(run(made))
        await made.until(lambda: bool(made.relay.pulls.recent()))
        (pull,) = made.relay.pulls.recent()
        assert pull.end == ""
        await cancelled(running)
        assert pull.end == "cancelled"


async def test_an_explained_placement_says_of_each_source_whether_it_is_chosen() -> None:
    async with two_workers(Script()) as made:
        names = split_names(PROMPT.block_names)[1:]
        placement, _ = await made.placer.explain(names, PROMPT.prompt_tokens)
        assert placement is not None
        options = made.placer.pull_options(placement, PROMPT.prompt_tokens)
        source, taker = (worker.address for worker in made.workers)
        assert options[source] == []
        (option,) = options[taker]
        assert option.verdict is PullVerdict.CHOSEN
        chosen = candidate_message(placement.chosen, [option])
        assert (chosen.pulled_from, chosen.pulled_tokens) == (SOURCE_ID, option.pulled_tokens)
        assert chosen.pull_options[0].saved_ms == placement.chosen.pull.saved_ms
