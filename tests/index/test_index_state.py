"""EXACT, DEGRADED or ABSENT: what a worker says of its part of the index, and what a router makes of all parts."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from blockyard.proto.prefix_index import ApplyResult, Batch, Berth, ErrorKind
from blockyard.proto.prefix_index_twin import TwinPrefixIndex
from blockyard.proto.v1.cluster_pb2 import IndexState, WorkerIndex
from blockyard.router.index_report import Parts, index_condition, quantile
from blockyard.worker.index_report import index_message, is_exact
from blockyard.worker.publisher import IndexPublisher, PublisherConfig, PublisherState

from .harness import chain, record

ABSENT, EXACT, DEGRADED = (
    IndexState.INDEX_STATE_ABSENT,
    IndexState.INDEX_STATE_EXACT,
    IndexState.INDEX_STATE_DEGRADED,
)
WELL = PublisherState(
    berth=Berth(number=1, epoch=7),
    num_pending=0,
    num_entries=20,
    num_anywhere=0,
    lag_seconds=0.0,
    is_resyncing=False,
    last_error=None,
    num_errors=0,
    num_resyncs=0,
)
GOOD, BAD = WorkerIndex(state=EXACT), WorkerIndex(state=DEGRADED)


@pytest.mark.parametrize(
    ("state", "exact"),
    [
        (WELL, True),
        (replace(WELL, num_pending=900, lag_seconds=1.0), True),
        (replace(WELL, num_pending=1, lag_seconds=1.1), False),
        (replace(WELL, berth=None), False),
        (replace(WELL, is_resyncing=True), False),
        (replace(WELL, last_error=ErrorKind.TIMEOUT), False),
        (replace(WELL, num_errors=9, num_resyncs=3), True),
    ],
)
def test_a_worker_is_exact_with_a_berth_all_told_answered_and_little_lag(
    state: PublisherState, exact: bool
) -> None:
    assert is_exact(state) is exact
    assert index_message(state).state == (EXACT if exact else DEGRADED)


def test_entries_are_what_the_index_was_told_of() -> None:
    both = replace(WELL, num_anywhere=35, berth=Berth(number=1, epoch=7, anywhere=2))
    assert index_message(both).entries == 35
    one_number = replace(WELL, num_anywhere=35)
    assert index_message(one_number).entries == 20
    sick = index_message(replace(WELL, num_pending=4, lag_seconds=2.5, num_resyncs=6, num_errors=8))
    assert (sick.pending, sick.lag_seconds, sick.resyncs, sick.errors) == (4, 2.5, 6, 8)


@pytest.mark.parametrize(
    ("answers", "parts", "state", "reason"),
    [
        (None, {}, ABSENT, "without Redis"),
        (None, {"a": GOOD}, ABSENT, "without Redis"),
        (False, {}, DEGRADED, "Redis does not answer"),
        (False, {"a": GOOD}, DEGRADED, "Redis does not answer"),
        (True, {}, EXACT, ""),
        (True, {"a": GOOD, "b": GOOD}, EXACT, ""),
        (True, {"a": GOOD, "b": BAD}, DEGRADED, "b gets no answer from Redis"),
        (True, {"a": None, "b": GOOD}, DEGRADED, "a tells the index nothing"),
        (
            True,
            {"c": BAD, "b": WorkerIndex(state=DEGRADED, pending=7, lag_seconds=2.0), "a": GOOD},
            DEGRADED,
            "b has 7 changes unconfirmed for 2.0 s, and 1 more of 3 workers",
        ),
        (True, {"a": WorkerIndex()}, DEGRADED, "a gets no answer from Redis"),
    ],
)
def test_the_index_is_as_good_as_its_look_ups_and_its_worst_part(
    answers: bool | None, parts: Parts, state: IndexState, reason: str
) -> None:
    condition = index_condition(answers, parts)
    assert condition.state == state
    assert condition.reason.endswith(reason)
    assert bool(condition.reason) is bool(reason)


class _HeldIndex(TwinPrefixIndex):
    """Answers a batch for each permit."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.permits = asyncio.Semaphore(0)
        self.num_asked = 0

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        self.num_asked += 1
        await self.permits.acquire()
        return await super().apply(berth, batch)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while True:
            if holds():
                return
            await asyncio.sleep(0.001)


async def test_a_resync_lasts_until_the_last_of_the_snapshot_is_confirmed() -> None:
    index, now_seconds = _HeldIndex(), 100.0
    config = PublisherConfig(lease_seconds=10_000, purge_seconds=10_000)
    publisher = IndexPublisher(index, record(), config=config, clock=lambda: now_seconds)
    publisher.record(chain(700), ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await until(lambda: index.num_asked == 1)
        publisher.record(chain(3, "new"), ())
        now_seconds += 5.0
        index.permits.release()
        await until(lambda: index.num_asked == 2)
        state = publisher.state()
        assert (state.is_resyncing, state.lag_seconds, state.num_pending) == (True, 5.0, 191)
        index.permits.release()
        await until(lambda: not publisher.state().num_pending)
        state = publisher.state()
        assert (state.is_resyncing, state.lag_seconds, state.num_resyncs) == (False, 0.0, 0)
        await publisher.close()


async def test_what_changes_while_a_batch_is_on_its_way_is_as_old_as_that_batch() -> None:
    index, now_seconds = _HeldIndex(), 100.0
    config = PublisherConfig(flush_seconds=60.0, lease_seconds=10_000, purge_seconds=10_000)
    publisher = IndexPublisher(index, record(), config=config, clock=lambda: now_seconds)
    publisher.record(chain(3), ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await until(lambda: index.num_asked == 1)
        now_seconds += 2.0
        publisher.record(chain(5)[3:], ())
        assert publisher.state().lag_seconds == 2.0
        index.permits.release()
        await until(lambda: publisher.state().num_pending == 2)
        now_seconds += 1.0
        assert publisher.state().lag_seconds == 3.0, "they changed after the batch was taken, at 100 s"
        assert not publisher.state().is_resyncing
        await publisher.close()


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, 0.0),
        ([3.0], 0.5, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        (range(1, 101), 0.99, 99.0),
        ([2.0], 0.0, 2.0),
    ],
)
def test_a_quantile_is_a_value_that_was_seen(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == expected
