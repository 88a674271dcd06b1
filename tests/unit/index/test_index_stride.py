"""An index with a stride of S blocks knows every true depth rounded down to a multiple of S, and nothing else."""

import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess
from blockyard.proto.index.contract import (
    MAX_BATCH_NAMES,
    ApplyResult,
    Batch,
    Incarnation,
    PrefixIndex,
    WorkerId,
)
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.naming.block_hash import chain as chain_names
from blockyard.proto.v1.session_pb2 import Hello
from blockyard.router.cluster.depths import CachedDepth
from blockyard.router.cluster.fleet import ModelIdentity
from blockyard.router.dispatch.prefix_lookup import PrefixLookup, PrefixLookupConfig
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.indexing.net_difference import TieredDifference
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.simulated.runner import SimulatedRunner
from blockyard.worker.startup.loading import load_engine

from .harness import chain, record

BLOCK_SIZE = 16
ROOT = bytes(16)
KNOWN = {WorkerId("w0"): Incarnation("1")}
PATIENT = PrefixLookupConfig(timeout_seconds=5.0)


class TrueWorker:
    """The real engine over a small pool, and the index that is told what its cache says after each step."""

    def __init__(self, index: PrefixIndex, stride_blocks: int, *, host_cache_blocks: int) -> None:
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
            num_blocks=24,
            swap_blocks_per_second=100.0,
        )
        self.stride_blocks = stride_blocks
        self._index = index
        self._has_host_cache = host_cache_blocks > 0
        self._difference = TieredDifference()
        self._sequence = 0
        self.num_removed = 0

    async def join(self) -> None:
        self._berth = await self._index.register(
            record(), lease_seconds=600, has_host_cache=self._has_host_cache
        )
        self._difference.restart(publishes_anywhere=self._has_host_cache)

    def submit(self, tokens: list[int], names: list[bytes]) -> None:
        self.engine.submit(
            EngineRequest(
                token_ids=tokens,
                prompt_length=len(tokens),
                names=[BlockName(name) for name in (ROOT, *names)],
                sampling=SamplingParams(max_tokens=2 + len(tokens) % 20),
            )
        )

    async def step(self) -> None:
        changes = self.engine.step().changes
        self.engine.scheduler.check_invariants()
        self._difference.on_gpu.record(changes.stored, changes.removed)
        self._difference.anywhere.record(changes.anywhere_stored, changes.anywhere_removed)
        while self._difference:
            self._sequence += 1
            batch: Batch = self._difference.take(MAX_BATCH_NAMES, sequence=self._sequence)
            self.num_removed += len(batch.removed)
            assert await self._index.apply(self._berth, batch) is ApplyResult.OK

    def rounded_depth(self, names: list[bytes]) -> CachedDepth | None:
        """Return what the index should answer for a chain."""
        typed = [BlockName(name) for name in names]
        on_gpu = len(self.engine.cache.match(typed))
        host_cache = self.engine.scheduler.host_cache
        anywhere = on_gpu + (len(host_cache.match(typed[on_gpu:])) if host_cache is not None else 0)
        on_gpu -= on_gpu % self.stride_blocks
        anywhere -= anywhere % self.stride_blocks
        return CachedDepth(blocks=on_gpu, host_blocks=anywhere - on_gpu) if anywhere else None


def random_prompts(chooser: random.Random) -> list[list[int]]:
    """They share beginnings of whole and of broken blocks, and end anywhere."""
    stems = [[group + 1] * chooser.randint(1, 100) for group in range(3)]
    tails = [[chooser.randint(10, 40) for _ in range(chooser.randint(0, 110))] for _ in range(12)]
    return [[*chooser.choice(stems), *tail] for tail in tails]


async def check_random_traffic(index: PrefixIndex, stride_blocks: int, seed: int) -> None:
    chooser = random.Random(seed)
    worker = TrueWorker(index, stride_blocks, host_cache_blocks=9 if seed % 2 else 0)
    await worker.join()
    lookup = PrefixLookup(index, config=PATIENT)
    prompts = random_prompts(chooser)
    all_names = [chain_names(ROOT, tokens, BLOCK_SIZE) for tokens in prompts]
    num_found = 0
    for _ in range(25):
        which = chooser.randrange(len(prompts))
        worker.submit(prompts[which], all_names[which])
        for _ in range(chooser.randint(0, 40)):
            await worker.step()
        for names in chooser.sample(all_names, 4):
            found = await lookup.lookup(names, KNOWN, stride_blocks=stride_blocks)
            assert found.available
            assert found.depth_by_worker.get(WorkerId("w0")) == worker.rounded_depth(names)
            num_found += bool(found.depth_by_worker)
    assert num_found > 5, "this traffic shows nothing"
    assert worker.num_removed, "nothing was evicted"


@pytest.mark.parametrize("stride_blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
async def test_the_twin_says_each_true_depth_rounded_down(stride_blocks: int, seed: int) -> None:
    await check_random_traffic(TwinPrefixIndex(lambda: 0.0), stride_blocks, seed)


@asynccontextmanager
async def redis_index(process: RedisProcess) -> AsyncIterator[RedisPrefixIndex]:
    async with connect(process.url, timeout_seconds=5.0) as client:
        yield RedisPrefixIndex(client, f"stride-{uuid.uuid4().hex}")


@pytest.mark.parametrize(("stride_blocks", "seed"), [(1, 1), (2, 2), (3, 3), (4, 4)])
async def test_redis_says_each_true_depth_rounded_down(
    redis_process: RedisProcess, stride_blocks: int, seed: int
) -> None:
    async with redis_index(redis_process) as index:
        await check_random_traffic(index, stride_blocks, seed)


@pytest.mark.parametrize(("stride_blocks", "num_names"), [(1, 12), (4, 3), (5, 2), (13, 0)])
async def test_of_each_group_of_blocks_the_index_holds_one_name(stride_blocks: int, num_names: int) -> None:
    index = TwinPrefixIndex(lambda: 0.0)
    worker = TrueWorker(index, stride_blocks, host_cache_blocks=0)
    await worker.join()
    tokens = list(range(1, 12 * BLOCK_SIZE + 1))
    names = chain_names(ROOT, tokens, BLOCK_SIZE)
    worker.submit(tokens, names)
    for _ in range(3):
        await worker.step()
    assert (await index.info()).names == num_names
    last_of_groups = names[stride_blocks - 1 :: stride_blocks]
    assert [holder.depth for holder in await index.lookup(last_of_groups)] == [num_names] * bool(num_names)


async def test_a_prompt_shorter_than_the_stride_asks_nothing() -> None:
    lookup = PrefixLookup(TwinPrefixIndex(lambda: 0.0))
    found = await lookup.lookup(chain(3), KNOWN, stride_blocks=4)
    assert (found.available, lookup.num_lookups) == (True, 0)


@pytest.mark.parametrize("stride_tokens", [0, -16, 8, 40])
def test_a_stride_that_is_no_multiple_of_the_block_size_is_refused(stride_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"positive multiple of the block size 16, not {stride_tokens}"):
        EngineConfig(model="demo", block_size=16, index_stride_tokens=stride_tokens)


def test_a_stride_longer_than_any_prompt_is_refused() -> None:
    model = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
    settings: dict[str, Any] = {
        "model": str(model),
        "engine": "simulated",
        "max_model_len": 256,
        "kv_cache_memory": 2**24,
    }
    with pytest.raises(
        ValueError, match=r"index_stride_tokens 272 is more than max_model_len 256: no prompt"
    ):
        load_engine(EngineConfig(**settings, index_stride_tokens=272))
    assert load_engine(EngineConfig(**settings, index_stride_tokens=256)).max_model_len == 256


def test_the_stride_in_blocks_is_one_unless_said_otherwise() -> None:
    strides = [
        EngineConfig(model="demo", block_size=32, index_stride_tokens=stride) for stride in (None, 32, 96)
    ]
    assert [config.index_stride_blocks for config in strides] == [1, 1, 3]


def test_a_worker_of_another_stride_is_told_so() -> None:
    first = ModelIdentity.of(Hello(block_size=16, index_stride_blocks=4))
    assert first.difference(Hello(block_size=16, index_stride_blocks=4)) is None
    refusal = first.difference(Hello(block_size=16))
    assert refusal == "index stride of 1 blocks, the first worker's is 4"
    assert (
        ModelIdentity.of(Hello(block_size=16)).difference(Hello(block_size=16, index_stride_blocks=1)) is None
    )
