"""Several servers share the prefixes of the index: each prefix is on one, and the loss of one darkens no other."""

import asyncio
import contextlib
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess
from blockyard.deploy.settings.setting import HIDDEN, masked
from blockyard.proto.index.contract import Berth, ErrorKind, Incarnation, PrefixIndex, WorkerId
from blockyard.proto.index.redis import RedisPrefixIndex, check_urls, connect
from blockyard.proto.index.shards import MAX_SHARDS, shard_of, split_urls
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.naming.block_hash import chain as chain_names
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.cluster.depths import CachedDepth
from blockyard.router.dispatch.index_report import IndexCondition, Part, index_condition, joined, parts_on
from blockyard.router.dispatch.prefix_lookup import (
    BreakerState,
    IndexHealth,
    PrefixLookup,
    PrefixLookupConfig,
)
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import is_exact, sharded_message
from blockyard.worker.indexing.sharded_publisher import ShardedPublisher
from blockyard.worker.indexing.state import PublisherConfig, PublisherState
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.simulated.runner import SimulatedRunner
from hypothesis import given
from hypothesis import strategies as st

from .harness import UnreliableIndex, chain, record

EXACT, DEGRADED = cluster_pb2.INDEX_STATE_EXACT, cluster_pb2.INDEX_STATE_DEGRADED
BLOCK_SIZE = 16
ROOT = bytes(16)
KNOWN = {WorkerId("w0"): Incarnation("1")}
PATIENT = PrefixLookupConfig(timeout_seconds=5.0, open_seconds=0.05, refresh_seconds=0.0)
QUICK = PublisherConfig(
    lease_seconds=0.9,
    flush_seconds=0.001,
    purge_seconds=0.02,
    resync_jitter_seconds=0.002,
    first_backoff_seconds=0.002,
    max_backoff_seconds=0.02,
    call_timeout_seconds=1.0,
)
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


class TrueWorker:
    """The real engine over a small pool, and its publishers, one for each server."""

    def __init__(self, shards: Sequence[PrefixIndex], stride_blocks: int, *, host_cache_blocks: int) -> None:
        self.engine = Engine(
            SchedulerConfig(
                block_size=BLOCK_SIZE,
                max_model_len=240,
                host_cache_blocks=host_cache_blocks,
                index_stride_blocks=stride_blocks,
            ),
            SimulatedRunner(
                vocab_size=50, prefill_tokens_per_second=1e9, step_seconds=0.0, sleep=lambda seconds: None
            ),
            num_blocks=40,
            swap_blocks_per_second=100.0,
        )
        self.stride_blocks = stride_blocks
        has_host_cache = host_cache_blocks > 0
        self.publisher = ShardedPublisher(
            [
                IndexPublisher(shard, record(), config=QUICK, has_host_cache=has_host_cache)
                for shard in shards
            ],
            has_host_cache=has_host_cache,
        )

    def serve(self, tokens: list[int], names: Iterable[bytes], num_steps: int) -> None:
        self.engine.submit(
            EngineRequest(
                token_ids=tokens,
                prompt_length=len(tokens),
                names=[BlockName(name) for name in (ROOT, *names)],
                sampling=SamplingParams(max_tokens=2 + len(tokens) % 20),
            )
        )
        for _ in range(num_steps):
            self.publisher.record(self.engine.step().changes)

    def rounded_depth(self, names: list[bytes]) -> CachedDepth | None:
        """Return what the index should answer for a chain."""
        typed = [BlockName(name) for name in names]
        on_gpu = len(self.engine.cache.match(typed))
        host_cache = self.engine.scheduler.host_cache
        anywhere = on_gpu + (len(host_cache.match(typed[on_gpu:])) if host_cache is not None else 0)
        on_gpu -= on_gpu % self.stride_blocks
        anywhere -= anywhere % self.stride_blocks
        return CachedDepth(blocks=on_gpu, host_blocks=anywhere - on_gpu) if anywhere else None

    async def until_exact(self, shards: Iterable[int]) -> None:
        """Wait until these servers know all changes."""
        async with asyncio.timeout(30):
            while True:
                states = self.publisher.states()
                if all(is_exact(states[shard]) and not states[shard].num_pending for shard in shards):
                    return
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running(publisher: ShardedPublisher) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        try:
            yield
        finally:
            await publisher.close()


class Darkness:
    """Servers that can be made dark one by one."""

    def __init__(self, indexes: Sequence[PrefixIndex]) -> None:
        self.dark: set[int] = set()
        self.shards: list[Any] = [
            UnreliableIndex(index, lambda name, shard=shard: self._fate(shard))
            for shard, index in enumerate(indexes)
        ]

    def _fate(self, shard: int) -> str:
        return "lose_request" if shard in self.dark else "deliver"


async def check_random_traffic(indexes: Sequence[PrefixIndex], stride_blocks: int, seed: int) -> None:
    """Look-ups equal the engine's caches, also of the prefixes on other servers while one is dark."""
    chooser, num_shards = random.Random(seed), len(indexes)
    darkness = Darkness(indexes)
    worker = TrueWorker(darkness.shards, stride_blocks, host_cache_blocks=9 if seed % 2 else 0)
    lookup = PrefixLookup(*darkness.shards, config=PATIENT)
    stems = [[group + 1] * chooser.randint(1, 100) for group in range(8)]
    tails = [[chooser.randint(10, 40) for _ in range(chooser.randint(0, 110))] for _ in range(16)]
    prompts = [[*chooser.choice(stems), *tail] for tail in tails]
    all_names = [chain_names(ROOT, tokens, BLOCK_SIZE) for tokens in prompts]
    found_on, unanswered = Counter[int](), 0
    async with running(worker.publisher):
        await worker.until_exact(range(num_shards))
        for number in range(24):
            if number % 4 == 0:
                darkness.dark = {chooser.randrange(num_shards)} if number % 8 else set()
            bright = [shard for shard in range(num_shards) if shard not in darkness.dark]
            which = chooser.randrange(len(prompts))
            worker.serve(prompts[which], all_names[which], chooser.randint(0, 40))
            await worker.until_exact(bright)
            for names in chooser.sample(all_names, 6):
                shard = lookup.shard_of(names, stride_blocks)
                found = await lookup.lookup(names, KNOWN, stride_blocks=stride_blocks)
                while shard in bright and not found.available:  # until the probe
                    await asyncio.sleep(0.01)
                    found = await lookup.lookup(names, KNOWN, stride_blocks=stride_blocks)
                if shard in darkness.dark and len(names) >= stride_blocks:
                    assert not found.available
                    unanswered += 1
                elif shard in bright:
                    assert found.depth_by_worker.get(WorkerId("w0")) == worker.rounded_depth(names)
                    found_on[shard] += bool(found.depth_by_worker)
        darkness.dark = set()
        await worker.until_exact(range(num_shards))
        tiers = [publisher._difference for publisher in worker.publisher._publishers]
        held = [tier.anywhere.held if seed % 2 else tier.on_gpu.held for tier in tiers]
        assert worker.publisher._shards.keys() == set().union(*held), "it forgets the names that are gone"
    assert len(found_on) == num_shards, "this traffic shows nothing"
    assert unanswered, "no prefix was on the dark server"


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("stride_blocks", [1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_twins_say_each_true_depth_while_one_is_dark(
    num_shards: int, stride_blocks: int, seed: int
) -> None:
    await check_random_traffic(
        [TwinPrefixIndex(time.monotonic) for _ in range(num_shards)], stride_blocks, seed
    )


@pytest.mark.parametrize(("stride_blocks", "seed"), [(1, 1), (2, 2)])
async def test_servers_say_each_true_depth_while_one_is_dark(
    shards: list[RedisProcess], stride_blocks: int, seed: int
) -> None:
    async with indexes_on([process.url for process in shards]) as indexes:
        await check_random_traffic(indexes, stride_blocks, seed)


@contextlib.asynccontextmanager
async def indexes_on(urls: Sequence[str]) -> AsyncIterator[list[RedisPrefixIndex]]:
    cluster = f"shards-{uuid.uuid4().hex}"
    async with contextlib.AsyncExitStack() as stack:
        yield [
            RedisPrefixIndex(
                await stack.enter_async_context(connect(url, timeout_seconds=1.0)), cluster, shard=shard
            )
            for shard, url in enumerate(urls)
        ]


async def test_servers_in_another_order_say_that_no_worker_is_there(shards: list[RedisProcess]) -> None:
    urls = [process.url for process in shards]
    async with indexes_on(urls) as indexes:
        moved = [
            RedisPrefixIndex(index._client, index._prefix.split(":")[1], shard=shard)
            for shard, index in enumerate([*indexes[1:], indexes[0]])
        ]
        worker = TrueWorker(indexes, 1, host_cache_blocks=0)
        async with running(worker.publisher):
            await worker.until_exact(range(len(shards)))
            lookup = PrefixLookup(*moved, config=PATIENT)
            for number in range(20):
                await lookup.lookup(chain(3, f"chain {number}"), KNOWN)
            assert lookup.errors == {ErrorKind.NO_LEASE: 20}
            assert not any([(await lookup.health(shard)).standing for shard in range(len(shards))])


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
            worker.serve(tokens, chain_names(ROOT, tokens, BLOCK_SIZE), 60)
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
