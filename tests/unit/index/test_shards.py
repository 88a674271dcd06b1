"""Several servers share the prefixes of the index: each prefix is on one, and the loss of one darkens no other."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import pytest
from blockyard.deploy.settings.setting import HIDDEN, masked
from blockyard.proto.index.contract import Berth, ErrorKind, Incarnation, WorkerId
from blockyard.proto.index.redis import check_urls
from blockyard.proto.index.shards import MAX_SHARDS, shard_of, split_urls
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.dispatch.index_report import IndexCondition, Part, index_condition, joined, parts_on
from blockyard.router.dispatch.prefix_lookup import (
    BreakerState,
    IndexHealth,
    PrefixLookup,
)
from blockyard.worker.indexing.report import sharded_message
from blockyard.worker.indexing.state import PublisherState
from hypothesis import given
from hypothesis import strategies as st

from .harness import chain
from .sharded_traffic import KNOWN, Darkness, TrueWorker, check_random_traffic, running
from .traffic import names_of

EXACT, DEGRADED = cluster_pb2.INDEX_STATE_EXACT, cluster_pb2.INDEX_STATE_DEGRADED
roots = st.binary(min_size=16, max_size=16)


@given(root=roots, num_shards=st.integers(1, MAX_SHARDS - 1))
def test_one_more_server_takes_prefixes_and_moves_none_between_others(root: bytes, num_shards: int) -> None:
    before, after = shard_of(root, num_shards), shard_of(root, num_shards + 1)
    assert after in (before, num_shards)


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_prefixes_spread_evenly(num_shards: int) -> None:
    counts = Counter(shard_of(sha256(b"%d" % number).digest()[:16], num_shards) for number in range(4000))
    mean = 4000 / num_shards
    assert all(abs(counts[shard] - mean) < 5 * mean**0.5 for shard in range(num_shards))


ONE = "redis://user:secret@one:6379/0"
SENTINEL = "redis+sentinel://user:secret@a:26379,b:26379/main/0"


@pytest.mark.parametrize(
    "urls",
    [
        [ONE],
        [SENTINEL],
        [SENTINEL, ONE, "rediss://two"],
        ["unix:///tmp/redis.sock", "rediss+sentinel://a,b/main", ONE],
    ],
)
def test_a_setting_names_servers_of_every_kind(urls: list[str]) -> None:
    setting = ",".join(urls)
    assert split_urls(setting) == tuple(urls)
    check_urls(setting)
    shown = masked(setting)
    assert shown is not None
    assert shown.count(HIDDEN) == setting.count("secret")
    assert "secret" not in shown


@pytest.mark.parametrize(
    "setting", ["", f"{ONE},", f"{ONE},two:6379", f"{ONE},redis://", ",".join([ONE] * 65)]
)
def test_a_list_with_a_wrong_url_is_refused_without_a_password_in_the_error(setting: str) -> None:
    with pytest.raises(ValueError, match="Redis") as refused:
        check_urls(setting)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("stride_blocks", [1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_twins_say_each_true_depth_while_one_is_dark(
    num_shards: int, stride_blocks: int, seed: int
) -> None:
    await check_random_traffic(
        [TwinPrefixIndex(time.monotonic) for _ in range(num_shards)], stride_blocks, seed
    )


async def test_each_server_has_a_breaker_of_its_own() -> None:
    darkness = Darkness([TwinPrefixIndex(time.monotonic) for _ in range(2)])
    lookup = PrefixLookup(*darkness.shards)
    darkness.dark = {1}
    chains = [chain(3, f"chain {number}") for number in range(20)]
    for names in chains:
        await lookup.lookup(names, KNOWN)
    assert (lookup.breaker_state(0), lookup.breaker_state(1)) == (BreakerState.CLOSED, BreakerState.OPEN)
    num_on_dark = sum(lookup.shard_of(names) for names in chains)
    assert lookup.errors == {ErrorKind.NO_LEASE: 20 - num_on_dark, ErrorKind.CONNECTION: 3}
    assert lookup.num_skipped == num_on_dark - 3
    assert [(await lookup.health(shard)).answers for shard in range(2)] == [True, False]
    size = await lookup.info()
    assert size is not None, "the server that answers is counted"


WELL = PublisherState(
    berth=Berth(number=1, epoch=1),
    num_pending=0,
    num_entries=7,
    num_anywhere=0,
    lag_seconds=0.0,
    is_resyncing=False,
    last_error=None,
    num_errors=2,
    num_resyncs=1,
)
SICK = replace(WELL, last_error=ErrorKind.CONNECTION, num_pending=3, lag_seconds=9.0)
OWNER = WorkerId("w0"), Incarnation("1")
HEALTHY = IndexHealth(answers=True, in_time=True, standing=frozenset({OWNER}))
AWAY = IndexHealth(answers=False, in_time=False, standing=frozenset())


def test_a_worker_tells_of_each_server_and_sums_them_up() -> None:
    message = sharded_message([WELL, SICK, WELL])
    assert [part.state for part in message.shards] == [EXACT, DEGRADED, EXACT]
    assert (message.state, message.entries, message.pending, message.errors) == (DEGRADED, 21, 3, 6)
    assert (message.lag_seconds, message.resyncs, message.cut_off) == (9.0, 3, False)
    assert message.state_reason == "gets no answer from Redis (shard 2 of 3)"
    assert sharded_message([SICK, SICK]).cut_off
    assert sharded_message([WELL, WELL]).state == EXACT
    assert not sharded_message([WELL]).shards


def condition_of(healths: Sequence[IndexHealth], report: cluster_pb2.WorkerIndex) -> IndexCondition:
    part = Part(worker_id=OWNER[0], incarnation=OWNER[1], index=report)
    return joined(
        [
            index_condition(health, parts_on(shard, len(healths), [part]), timeout_seconds=0.04)
            for shard, health in enumerate(healths)
        ]
    )


def test_the_state_names_the_servers_that_are_dark_and_no_address() -> None:
    whole = condition_of([HEALTHY, HEALTHY], sharded_message([WELL, WELL]))
    assert whole == IndexCondition(state=EXACT, is_available=True)
    one = condition_of([HEALTHY, AWAY], sharded_message([WELL, SICK]))
    assert one == IndexCondition(
        state=DEGRADED, reason="shard 2 of 2: Redis does not answer", is_available=True
    )
    unheard = condition_of([HEALTHY, HEALTHY], sharded_message([SICK, WELL]))
    assert unheard.reason == (
        "shard 1 of 2: w0 gets no answer from Redis: placement runs without the index for now"
    )
    none = condition_of([AWAY, AWAY], sharded_message([SICK, SICK]))
    assert none.reason == "shard 1 of 2: Redis does not answer; shard 2 of 2: Redis does not answer"
    assert not none.is_available


@pytest.mark.parametrize(
    ("num_router", "num_worker", "reason"),
    [
        (1, 2, "w0 publishes to 2 Redis servers, and this router reads one Redis server"),
        (2, 1, "w0 publishes to one Redis server, and this router reads 2 Redis servers"),
    ],
)
def test_a_worker_with_another_number_of_servers_is_told(
    num_router: int, num_worker: int, reason: str
) -> None:
    condition = condition_of([HEALTHY] * num_router, sharded_message([WELL] * num_worker))
    assert condition.state == DEGRADED
    assert condition.reason.split("; ")[0].removeprefix("shard 1 of 2: ") == reason


async def test_a_withdrawn_worker_is_on_no_server_and_comes_back_on_each() -> None:
    twins = [TwinPrefixIndex(time.monotonic) for _ in range(2)]
    worker = TrueWorker(twins, 1, host_cache_blocks=0)
    prompts = [[group] * 40 for group in range(1, 9)]
    async with running(worker.publisher):
        for tokens in prompts:
            worker.serve(tokens, names_of(tokens), 60)
        await worker.until_exact(range(2))
        counts = [(await twin.info()).names for twin in twins]
        assert all(counts)
        worker.publisher.withdraw()
        assert not worker.publisher.rebuild()
        async with asyncio.timeout(30):
            while True:
                if not any([(await twin.info()).names for twin in twins]):
                    break
                await asyncio.sleep(0.01)  # until the purge
        worker.publisher.restore()
        await worker.until_exact(range(2))
        assert [(await twin.info()).names for twin in twins] == counts
        assert worker.publisher.rebuild()
    assert [await twin.directory() for twin in twins] == [[], []]
