"""A real engine over a small pool, random prompts for it, and what an index should say of its caches."""

import random
from collections.abc import Iterable

from blockyard.proto.index.contract import (
    MAX_BATCH_NAMES,
    ApplyResult,
    Batch,
    Incarnation,
    PrefixIndex,
    WorkerId,
)
from blockyard.proto.naming.block_hash import chain as chain_names
from blockyard.router.cluster.depths import CachedDepth
from blockyard.router.dispatch.prefix_lookup import PrefixLookup, PrefixLookupConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.indexing.net_difference import TieredDifference
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.simulated.runner import SimulatedRunner

from .harness import record

BLOCK_SIZE = 16
ROOT = bytes(16)


def make_engine(num_blocks: int, stride_blocks: int, host_cache_blocks: int) -> Engine:
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        max_model_len=240,
        host_cache_blocks=host_cache_blocks,
        index_stride_blocks=stride_blocks,
    )
    runner = SimulatedRunner(
        vocab_size=50, prefill_tokens_per_second=1e9, step_seconds=0.0, sleep=lambda seconds: None
    )
    return Engine(config, runner, num_blocks=num_blocks, swap_blocks_per_second=100.0)


def names_of(tokens: list[int]) -> list[bytes]:
    return chain_names(ROOT, tokens, BLOCK_SIZE)


def request(tokens: list[int], names: Iterable[bytes]) -> EngineRequest:
    return EngineRequest(
        token_ids=tokens,
        prompt_length=len(tokens),
        names=[BlockName(name) for name in (ROOT, *names)],
        sampling=SamplingParams(max_tokens=2 + len(tokens) % 20),
    )


def rounded_depth(engine: Engine, stride_blocks: int, names: list[bytes]) -> CachedDepth | None:
    """Return what the index should answer for a chain."""
    typed = [BlockName(name) for name in names]
    on_gpu = len(engine.cache.match(typed))
    host_cache = engine.scheduler.host_cache
    anywhere = on_gpu + (len(host_cache.match(typed[on_gpu:])) if host_cache is not None else 0)
    on_gpu -= on_gpu % stride_blocks
    anywhere -= anywhere % stride_blocks
    return CachedDepth(blocks=on_gpu, host_blocks=anywhere - on_gpu) if anywhere else None


def random_prompts(chooser: random.Random, num_stems: int, num_prompts: int) -> list[list[int]]:
    """Return prompts that share beginnings of whole and of broken blocks, and end anywhere."""
    stems = [[group + 1] * chooser.randint(1, 100) for group in range(num_stems)]
    tails = [[chooser.randint(10, 40) for _ in range(chooser.randint(0, 110))] for _ in range(num_prompts)]
    return [[*chooser.choice(stems), *tail] for tail in tails]


KNOWN = {WorkerId("w0"): Incarnation("1")}


PATIENT = PrefixLookupConfig(timeout_seconds=5.0)


class TrueWorker:
    """The real engine over a small pool, and the index that is told what its cache says after each step."""

    def __init__(self, index: PrefixIndex, stride_blocks: int, *, host_cache_blocks: int) -> None:
        self.engine = make_engine(24, stride_blocks, host_cache_blocks)
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
        self.engine.submit(request(tokens, names))

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


async def check_random_traffic(index: PrefixIndex, stride_blocks: int, seed: int) -> None:
    chooser = random.Random(seed)
    worker = TrueWorker(index, stride_blocks, host_cache_blocks=9 if seed % 2 else 0)
    await worker.join()
    lookup = PrefixLookup(index, config=PATIENT)
    prompts = random_prompts(chooser, 3, 12)
    all_names = [names_of(tokens) for tokens in prompts]
    num_found = 0
    for _ in range(25):
        which = chooser.randrange(len(prompts))
        worker.submit(prompts[which], all_names[which])
        for _ in range(chooser.randint(0, 40)):
            await worker.step()
        for names in chooser.sample(all_names, 4):
            found = await lookup.lookup(names, KNOWN, stride_blocks=stride_blocks)
            assert found.available
            assert found.depth_by_worker.get(WorkerId("w0")) == rounded_depth(
                worker.engine, stride_blocks, names
            )
            num_found += bool(found.depth_by_worker)
    assert num_found > 5, "this traffic shows nothing"
    assert worker.num_removed, "nothing was evicted"
