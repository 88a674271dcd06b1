"""A real engine with host memory tells the index what it then finds."""

from blockyard.proto.index.contract import (
    MAX_BATCH_NAMES,
    ApplyResult,
    PrefixIndex,
)
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.naming.block_hash import chain as chain_names
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.indexing.net_difference import TieredDifference
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.simulated.runner import SimulatedRunner

from .harness import record

LEASE_SECONDS = 60.0


BLOCK_SIZE = 16


async def depths(index: PrefixIndex, names: tuple[bytes, ...]) -> dict[str, tuple[int, int]]:
    """On the GPU, and in host memory beyond that."""
    return {holder.worker_id: (holder.depth, holder.host_blocks) for holder in await index.lookup(names)}


async def test_the_index_says_what_a_real_engine_then_finds() -> None:
    engine = Engine(
        SchedulerConfig(block_size=BLOCK_SIZE, max_model_len=128, host_cache_blocks=7),
        SimulatedRunner(
            vocab_size=50, prefill_tokens_per_second=1e9, step_seconds=0.0, sleep=lambda seconds: None
        ),
        num_blocks=9,
        swap_blocks_per_second=100.0,
    )
    index, difference = TwinPrefixIndex(lambda: 0.0), TieredDifference()
    berth = await index.register(record("a"), lease_seconds=LEASE_SECONDS, has_host_cache=True)
    difference.restart(publishes_anywhere=True)
    prompts = [[group % 3 + 1] * 32 + [group + 10] * (16 + 16 * (group % 3)) + [1] for group in range(8)]
    all_names = [chain_names(bytes(16), tokens, BLOCK_SIZE) for tokens in prompts]
    from_host = 0
    for number in range(60):
        which = (5 * number + number // 3) % 8
        engine.submit(
            EngineRequest(
                token_ids=prompts[which],
                prompt_length=len(prompts[which]),
                names=[BlockName(name) for name in (bytes(16), *all_names[which])],
                sampling=SamplingParams(max_tokens=2),
            )
        )
        while engine.has_work:
            changes = engine.step().changes
            difference.on_gpu.record(changes.stored, changes.removed)
            difference.anywhere.record(changes.anywhere_stored, changes.anywhere_removed)
        batch = difference.take(MAX_BATCH_NAMES, sequence=number + 1)
        assert await index.apply(berth, batch) is ApplyResult.OK
        for names in all_names:
            found = found_by(engine, [BlockName(name) for name in names])
            assert (await depths(index, tuple(names))).get("a", (0, 0)) == found
            from_host += found[1]
    assert from_host > 100
    host_cache, load = engine.scheduler.host_cache, engine.load()
    assert host_cache is not None
    assert host_cache.num_evictions > 0
    assert load.host_cached_blocks == len(host_cache) > 0
    assert load.host_tokens_per_second == 2 * 100.0 * BLOCK_SIZE, "loading is half of there and back"


def found_by(engine: Engine, names: list[BlockName]) -> tuple[int, int]:
    on_gpu = len(engine.cache.match(names))
    assert engine.scheduler.host_cache is not None
    return on_gpu, len(engine.scheduler.host_cache.match(names[on_gpu:]))
