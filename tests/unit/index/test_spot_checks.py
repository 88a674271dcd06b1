"""A publisher finds out by its own checks that the index lost what it had confirmed."""

import asyncio
import time
from typing import Any

import pytest
from blockyard.proto.index.contract import (
    ApplyResult,
    Batch,
    Berth,
    ErrorKind,
)
from blockyard.proto.index.redis import error_kind
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.worker.indexing.net_difference import NetDifference
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import index_message
from blockyard.worker.indexing.spot_checks import MAX_GONE, MAX_HELD, SpotChecks
from blockyard.worker.indexing.state import PublisherConfig
from redis.exceptions import ResponseError

from .harness import chain, record

QUICK = PublisherConfig(
    lease_seconds=0.3,
    flush_seconds=0.002,
    purge_seconds=0.02,
    purge_slice_seconds=0.002,
    resync_jitter_seconds=0.005,
    first_backoff_seconds=0.005,
    max_backoff_seconds=0.02,
    damage_rest_seconds=0.0,
)


async def until_told(publisher: IndexPublisher) -> None:
    async with asyncio.timeout(10):
        while publisher.state().berth is None or publisher.state().num_pending:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_checks_go_round_all_that_the_index_was_told() -> None:
    difference, checks = NetDifference(), SpotChecks()
    difference.record(chain(2 * MAX_HELD + 50), ())
    assert checks.take(difference) == ((), ()), "nothing is told yet"
    checks.restart()
    difference.take_added(2 * MAX_HELD)
    asked = [checks.take(difference)[0] for _ in range(3)]
    assert [name for names in asked for name in names] == list(chain(2 * MAX_HELD))
    assert checks.take(difference)[0] == asked[0]


def test_what_was_told_as_removed_is_asked_for_once_unless_it_came_back() -> None:
    difference, checks, names = NetDifference(), SpotChecks(), chain(MAX_GONE + 2)
    checks.removed(names)
    difference.record(names[:1], ())
    assert checks.take(difference) == ((), names[1:MAX_GONE])
    assert checks.take(difference) == ((), names[MAX_GONE:])
    assert checks.take(difference) == ((), ())


class _ForgetfulIndex(TwinPrefixIndex):
    """Confirms a batch and keeps only a part of it."""

    def __init__(self, forgotten: str) -> None:
        super().__init__(time.monotonic)
        self.forgotten = forgotten

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        names: dict[str, Any] = {part: getattr(batch, part) for part in ("added", "removed")}
        if names.get(self.forgotten):
            names[self.forgotten], self.forgotten = (), ""
        return await super().apply(berth, Batch(sequence=batch.sequence, **names))


@pytest.mark.parametrize("forgotten", ["added", "removed"])
async def test_news_lost_behind_a_confirmed_batch_are_told_again(forgotten: str) -> None:
    index = _ForgetfulIndex(forgotten)
    publisher = IndexPublisher(index, record("a"), config=QUICK)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        publisher.record(chain(9), ())
        await until_told(publisher)
        publisher.record((), tuple(reversed(chain(9)[5:])))
        async with asyncio.timeout(10):
            while [holder.depth for holder in await index.lookup(chain(9))] != [5]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert index_message(publisher.state()).damages == 1
        await publisher.close()


async def test_damage_that_comes_again_and_again_is_not_answered_each_time() -> None:
    index = TwinPrefixIndex(time.monotonic)
    config = PublisherConfig(lease_seconds=0.06, damage_rest_seconds=60.0, resync_jitter_seconds=0.0)
    publisher = IndexPublisher(index, record("a"), config=config)
    publisher.record(chain(9), ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await until_told(publisher)
        for _ in range(20):
            for bucket in index._buckets:
                bucket.clear()
            await asyncio.sleep(0.02)
        assert publisher.state().num_damages == 1
        await publisher.close()


def test_a_wrong_type_has_a_kind_of_its_own() -> None:
    text = "@user_script:8: WRONGTYPE Operation against a key holding the wrong kind of value"
    assert error_kind(ResponseError(text)) is ErrorKind.DAMAGED
