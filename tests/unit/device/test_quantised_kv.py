"""KV in 8 bits through the engine: in deterministic mode tokens are equal after any preemption, swap or cache hit."""

from pathlib import Path
from typing import Any, cast

import pytest
from blockyard.proto.naming.block_hash import chain
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.llm import LLM
from blockyard.worker.memory.kv_size import KVCacheDtype
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.startup.loading import load_engine

from tests.unit.worker.checkpoints import reference_greedy, shared_checkpoint
from tests.unit.worker.test_division import DEMO
from tests.unit.worker.test_engine_tokens import (
    BLOCK_SIZE,
    ROOT,
    outputs_of,
    prompt_of,
    run,
    submit,
    tokens_of,
)

# Keys and values, layers, kv heads, tokens, and a head of 16 numbers with its scale.
BYTES_PER_BLOCK = 2 * 3 * 2 * BLOCK_SIZE * (16 + 4)
SAMPLED: dict[str, Any] = {"temperature": 1.1, "top_k": 60, "seed": 5, "n": 3}

pytestmark = pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])


@pytest.fixture
def qwen3() -> Path:
    return shared_checkpoint("Qwen3ForCausalLM")


def make_engine(
    folder: Path, kv_cache_dtype: KVCacheDtype, *, num_blocks: int = 64, **settings: Any
) -> Engine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=num_blocks * BYTES_PER_BLOCK,
        **{"deterministic": True, "max_model_len": min(num_blocks, 16) * BLOCK_SIZE, **settings},
    )
    return load_engine(config).engine


def alone(folder: Path, kv_cache_dtype: KVCacheDtype, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    engine = make_engine(folder, kv_cache_dtype)
    request = submit(engine, prompt, num_tokens)
    return run(engine)[request][0]


def test_a_request_does_not_show_its_company_nor_its_chunks(
    qwen3: Path, kv_cache_dtype: KVCacheDtype
) -> None:
    engine = make_engine(qwen3, kv_cache_dtype, max_num_batched_tokens=19, max_num_seqs=4)
    request = submit(engine, prompt_of(65), 12)
    for number in range(3):
        submit(engine, prompt_of(9 + 20 * number, seed=1), 9)
    assert run(engine)[request][0] == alone(qwen3, kv_cache_dtype, prompt_of(65), 12)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_nor_that_it_gave_way(qwen3: Path, kv_cache_dtype: KVCacheDtype, preempt: str) -> None:
    engine = make_engine(qwen3, kv_cache_dtype, num_blocks=9, preempt=preempt, swap_space_gib=0.001)
    for number in range(4):
        submit(engine, prompt_of(40, seed=number), 30)
    tokens = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert (engine.scheduler.num_swaps > 0) == (preempt == "swap")
    for number in range(4):
        expected = alone(qwen3, kv_cache_dtype, prompt_of(40, seed=number), 30)
        assert tokens[RequestId(number)][0] == expected


def test_nor_that_its_prefix_came_from_the_cache_or_from_host_memory(
    qwen3: Path, kv_cache_dtype: KVCacheDtype
) -> None:
    engine = make_engine(qwen3, kv_cache_dtype, num_blocks=8, host_cache_gib=0.001)
    expected = alone(qwen3, kv_cache_dtype, prompt_of(65), 12)
    submit(engine, prompt_of(65), 1)
    run(engine)
    cached = submit(engine, prompt_of(65), 12)
    assert run(engine)[cached] == (expected, 64)
    submit(engine, prompt_of(110, seed=5), 12)
    run(engine)
    assert not engine.cache.match(list(map(BlockName, chain(ROOT, prompt_of(65), BLOCK_SIZE))))
    loaded = submit(engine, prompt_of(65), 12)
    assert run(engine)[loaded] == (expected, 64)


def test_nor_that_its_blocks_were_copied_at_a_fork(qwen3: Path, kv_cache_dtype: KVCacheDtype) -> None:
    forked = make_engine(qwen3, kv_cache_dtype)
    submit(forked, prompt_of(37), 20, **SAMPLED)
    outputs = [tokens_of(output) for output in outputs_of(forked).values()]
    assert len({tuple(output) for output in outputs}) == 3
    crowded = make_engine(qwen3, kv_cache_dtype, max_num_batched_tokens=16, max_num_seqs=8)
    first = submit(crowded, prompt_of(37), 20, **SAMPLED)
    submit(crowded, prompt_of(50, seed=2), 20, **SAMPLED)
    again = {key: tokens_of(output) for key, output in outputs_of(crowded).items() if key[0] == first}
    assert [again[first, index] for index in range(3)] == outputs


def test_what_a_block_takes_is_what_the_pools_have(qwen3: Path, kv_cache_dtype: KVCacheDtype) -> None:
    config = EngineConfig(
        model=str(qwen3), device="cpu", kv_cache_dtype=kv_cache_dtype, kv_cache_memory=10**6
    )
    loaded = load_engine(config)
    runner = cast(TorchRunner, loaded.runner)
    assert loaded.engine.bytes_per_block == sum(pool[0].nbytes for pool in runner.kv_pools) == BYTES_PER_BLOCK
    assert loaded.kv_size.num_blocks == len(runner.kv_pools[0]) == 10**6 // BYTES_PER_BLOCK


def test_blocks_of_another_type_have_other_names(qwen3: Path, kv_cache_dtype: KVCacheDtype) -> None:
    llm, exact = (
        LLM(str(qwen3), tokenizer=str(DEMO), device="cpu", kv_cache_memory=10**6, kv_cache_dtype=kind)
        for kind in (kv_cache_dtype, "auto")
    )
    assert (llm._loaded.kv_dtype, exact._loaded.kv_dtype) == (kv_cache_dtype, "float32")
    assert llm._loaded.model_fingerprint == exact._loaded.model_fingerprint
    assert llm._root != exact._root


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_stay_near_those_of_an_exact_cache(
    qwen3: Path, kv_cache_dtype: KVCacheDtype, dtype: str
) -> None:
    engine = make_engine(qwen3, kv_cache_dtype, deterministic=False, dtype=dtype)
    prompts = [prompt_of(length) for length in range(5, 37)]
    requests = [submit(engine, prompt, 1) for prompt in prompts]
    tokens = run(engine)
    agreeing = sum(
        tokens[request][0] == list(reference_greedy(qwen3, prompt, 1).tokens)
        for request, prompt in zip(requests, prompts, strict=True)
    )
    print(f"{agreeing} of {len(prompts)} first tokens agree")
    assert agreeing >= 0.8 * len(prompts)
