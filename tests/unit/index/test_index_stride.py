"""An index with a stride of S blocks knows every true depth rounded down to a multiple of S, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.v1.session_pb2 import Hello
from blockyard.router.cluster.fleet import ModelIdentity
from blockyard.router.dispatch.prefix_lookup import PrefixLookup
from blockyard.worker.config import EngineConfig
from blockyard.worker.startup.loading import load_engine

from .harness import chain
from .traffic import BLOCK_SIZE, KNOWN, TrueWorker, check_random_traffic, names_of


@pytest.mark.parametrize("stride_blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
async def test_the_twin_says_each_true_depth_rounded_down(stride_blocks: int, seed: int) -> None:
    await check_random_traffic(TwinPrefixIndex(lambda: 0.0), stride_blocks, seed)


@pytest.mark.parametrize(("stride_blocks", "num_names"), [(1, 12), (4, 3), (5, 2), (13, 0)])
async def test_of_each_group_of_blocks_the_index_holds_one_name(stride_blocks: int, num_names: int) -> None:
    index = TwinPrefixIndex(lambda: 0.0)
    worker = TrueWorker(index, stride_blocks, host_cache_blocks=0)
    await worker.join()
    tokens = list(range(1, 12 * BLOCK_SIZE + 1))
    names = names_of(tokens)
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
