"""EXACT, DEGRADED or ABSENT: a worker's report of its part of the index, and a router's summary of all parts."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from blockyard.proto.index.contract import (
    MAX_BATCH_NAMES,
    ApplyResult,
    Batch,
    Berth,
    ErrorKind,
    Incarnation,
    PurgeProgress,
    RenewResult,
    WorkerId,
)
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.v1.cluster_pb2 import IndexState, WorkerIndex
from blockyard.router.dispatch.index_report import Part, index_condition, quantile
from blockyard.router.dispatch.prefix_lookup import IndexHealth
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import index_message, is_exact
from blockyard.worker.indexing.state import PublisherConfig, PublisherState

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
LATE = WorkerIndex(state=DEGRADED, state_reason="is late")
HEALTHY = IndexHealth(
    answers=True,
    in_time=True,
    standing=frozenset((WorkerId(name), Incarnation("1")) for name in ("a", "b", "c")),
)
SLOW = replace(HEALTHY, in_time=False)
AWAY = IndexHealth(answers=False, in_time=False, standing=frozenset())


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
    assert bool(index_message(state).state_reason) is not exact


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (replace(WELL, last_error=ErrorKind.TIMEOUT, num_pending=3), "gets no answer from Redis"),
        (replace(WELL, berth=None, last_error=ErrorKind.CONNECTION), "gets no answer from Redis"),
        (replace(WELL, last_error=ErrorKind.READ_ONLY), "is refused by Redis (read only)"),
        (replace(WELL, berth=None), "registers in the index: it was not registered yet, or Redis lost it"),
        (
            replace(WELL, is_resyncing=True, num_pending=1500, lag_seconds=3.0),
            "republishes all its blocks, 1,500 changes are left",
        ),
        (replace(WELL, num_pending=7, lag_seconds=2.0), "has 7 changes unconfirmed for 2.0 s"),
    ],
)
def test_a_worker_says_what_is_wrong_and_not_that_redis_is_away_when_it_answers(
    state: PublisherState, reason: str
) -> None:
    assert index_message(state).state_reason == reason


def test_entries_are_what_the_index_was_told_of() -> None:
    both = replace(WELL, num_anywhere=35, berth=Berth(number=1, epoch=7, anywhere=2))
    assert index_message(both).entries == 35
    one_number = replace(WELL, num_anywhere=35)
    assert index_message(one_number).entries == 20
    sick = index_message(replace(WELL, num_pending=4, lag_seconds=2.5, num_resyncs=6, num_errors=8))
    assert (sick.pending, sick.lag_seconds, sick.resyncs, sick.errors) == (4, 2.5, 6, 8)


@pytest.mark.parametrize(
    ("health", "parts", "state", "reason"),
    [
        (None, {}, ABSENT, "without Redis"),
        (None, {"a": GOOD}, ABSENT, "without Redis"),
        (AWAY, {}, DEGRADED, "Redis does not answer"),
        (AWAY, {"a": GOOD}, DEGRADED, "Redis does not answer"),
        (HEALTHY, {}, EXACT, ""),
        (HEALTHY, {"a": GOOD, "b": GOOD}, EXACT, ""),
        (
            SLOW,
            {"a": GOOD},
            DEGRADED,
            "look-ups take longer than 40 ms: placement runs without the index for now",
        ),
        (HEALTHY, {"a": GOOD, "b": BAD}, DEGRADED, "b reports that its part is not exact"),
        (SLOW, {"a": None, "b": GOOD}, DEGRADED, "a publishes nothing to the index"),
        (
            HEALTHY,
            {"a": GOOD, "elsewhere": GOOD},
            DEGRADED,
            "elsewhere is not in this router's index, which lost its data, or has another Redis or cluster name",
        ),
        (HEALTHY, {"c": BAD, "b": LATE, "a": GOOD}, DEGRADED, "b is late, and 1 more of 3 workers"),
        (HEALTHY, {"a": WorkerIndex()}, DEGRADED, "a reports that its part is not exact"),
    ],
)
def test_the_index_is_as_good_as_its_look_ups_and_its_worst_part(
    health: IndexHealth | None, parts: dict[str, WorkerIndex | None], state: IndexState, reason: str
) -> None:
    known = [
        Part(worker_id=WorkerId(name), incarnation=Incarnation("1"), index=part)
        for name, part in sorted(parts.items())
    ]
    condition = index_condition(health, known, timeout_seconds=0.04)
    assert condition.state == state
    assert condition.reason.endswith(reason)
    assert bool(condition.reason) is bool(reason)
    assert condition.is_available is (health is HEALTHY)


def test_of_two_lives_of_one_worker_each_must_stand_in_the_index() -> None:
    parts = [
        Part(worker_id=WorkerId("a"), incarnation=Incarnation(incarnation), index=GOOD)
        for incarnation in ("1", "2")
    ]
    condition = index_condition(HEALTHY, parts, timeout_seconds=0.04)
    assert (condition.state, condition.reason.startswith("a is not in")) == (DEGRADED, True)


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
    async with asyncio.timeout(60):
        while True:
            if holds():
                return
            await asyncio.sleep(0.001)


async def test_a_resync_lasts_until_the_last_of_the_snapshot_is_confirmed() -> None:
    index, now_seconds = _HeldIndex(), 100.0
    config = PublisherConfig(rest_ratio=0.0, lease_seconds=10_000, purge_seconds=10_000)
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


class _EvictingIndex(TwinPrefixIndex):
    """While it is asked to purge for the first time, the worker evicts all that it holds."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.publisher: IndexPublisher | None = None

    async def purge(self, *, slice_buckets: int = 64) -> PurgeProgress:
        if self.publisher is not None and self.publisher.state().is_resyncing:
            self.publisher.record((), tuple(reversed(chain(3))))
        return await super().purge(slice_buckets=slice_buckets)


async def test_a_resync_that_has_nothing_left_to_tell_is_over() -> None:
    index = _EvictingIndex()
    publisher = index.publisher = IndexPublisher(index, record(), config=PublisherConfig(purge_seconds=60))
    publisher.record(chain(3), ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await until(lambda: publisher.state().berth is not None and not publisher.state().num_pending)
        assert is_exact(publisher.state())
        await publisher.close()


class _SlowIndex(TwinPrefixIndex):
    """A batch takes 20 ms. Notes when batches came and were done, and how often the lease was renewed."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.batches: list[tuple[float, float]] = []
        self.num_renewals = 0

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        began = time.monotonic()
        await asyncio.sleep(0.02)
        self.batches.append((began, time.monotonic()))
        return await super().apply(berth, batch)

    async def renew(self, berth: Berth, **arguments: Any) -> RenewResult:
        self.num_renewals += 1
        return await super().renew(berth, **arguments)


async def test_after_a_full_batch_the_publisher_rests_and_after_the_last_one_it_need_not() -> None:
    index = _SlowIndex()
    config = PublisherConfig(rest_ratio=3.0, flush_seconds=0.0, lease_seconds=10_000)
    publisher = IndexPublisher(index, record(), config=config)
    publisher.record(chain(3 * MAX_BATCH_NAMES), ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await until(lambda: len(index.batches) == 3 and not publisher.state().num_pending)
        await publisher.close()
    for (began, ended), (next_began, _) in pairwise(index.batches):
        assert next_began - ended >= 2.9 * (ended - began)


async def test_no_rest_is_so_long_that_the_lease_lapses() -> None:
    index = _SlowIndex()
    config = PublisherConfig(rest_ratio=1e6, lease_seconds=0.3)
    publisher = IndexPublisher(index, record(), config=config)
    publisher.record(chain(4 * MAX_BATCH_NAMES), ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await until(lambda: not publisher.state().num_pending and publisher.state().berth is not None)
        assert index.num_renewals >= 2
        assert publisher.state().num_resyncs == 0
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
