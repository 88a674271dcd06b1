"""KV in 8 bits through the engine: in deterministic mode tokens are equal after any preemption, swap or cache hit."""

from pathlib import Path
from typing import Any

import pytest
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.startup.loading import load_engine

from tests.unit.worker.checkpoints import reference_greedy, shared_checkpoint
from tests.unit.worker.token_engines import (
    BLOCK_SIZE,
    engine_of,
    names_of,
    outputs_of,
    prompt_of,
    run,
    submit,
    tokens_of,
)

# Keys and values, layers, kv heads, tokens, and a head of 16 numbers with its scale.
BYTES_PER_BLOCK = 2 * 3 * 2 * BLOCK_SIZE * (16 + 4)

pytestmark = pytest.mark.parametrize("dtype", ["int8", "fp8"])


@pytest.fixture
def qwen3() -> Path:
    return shared_checkpoint("Qwen3ForCausalLM")


def make_engine(kv_cache_dtype: str, *, num_blocks: int = 64, **settings: Any) -> Engine:
    memory = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_memory": num_blocks * BYTES_PER_BLOCK}
    longest = min(num_blocks, 16) * BLOCK_SIZE
    settings = {"deterministic": True, "max_model_len": longest} | memory | settings
    return engine_of(shared_checkpoint("Qwen3ForCausalLM"), **settings)


def alone(dtype: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    engine = make_engine(dtype)
    request = submit(engine, prompt, num_tokens)
    return run(engine)[request][0]


def test_a_request_does_not_show_its_company_nor_its_chunks(dtype: str) -> None:
    engine = make_engine(dtype, max_num_batched_tokens=19, max_num_seqs=4)
    request = submit(engine, prompt_of(65), 12)
    for number in range(3):
        submit(engine, prompt_of(9 + 20 * number, seed=1), 9)
    assert run(engine)[request][0] == alone(dtype, prompt_of(65), 12)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_nor_that_it_gave_way(dtype: str, preempt: str) -> None:
    engine = make_engine(dtype, num_blocks=7, preempt=preempt, swap_space_gib=0.001)
    for number in range(2):
        submit(engine, prompt_of(40, seed=number), 20)
    tokens = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert (engine.scheduler.num_swaps > 0) == (preempt == "swap")
    for number in range(2):
        assert tokens[RequestId(number)][0] == alone(dtype, prompt_of(40, seed=number), 20)


def test_nor_that_its_prefix_came_from_the_cache_or_from_host_memory(dtype: str) -> None:
    engine = make_engine(dtype, num_blocks=8, host_cache_gib=0.001)
    expected = alone(dtype, prompt_of(65), 12)
    submit(engine, prompt_of(65), 1)
    run(engine)
    cached = submit(engine, prompt_of(65), 12)
    assert run(engine)[cached] == (expected, 64)
    submit(engine, prompt_of(110, seed=5), 12)
    run(engine)
    assert not engine.cache.match(names_of(prompt_of(65))[1:])
    loaded = submit(engine, prompt_of(65), 12)
    assert run(engine)[loaded] == (expected, 64)


def test_nor_that_its_blocks_were_copied_at_a_fork(dtype: str) -> None:
    sampled: dict[str, Any] = {"temperature": 1.1, "top_k": 60, "seed": 5, "n": 3}
    forked, crowded = make_engine(dtype), make_engine(dtype, max_num_batched_tokens=16, max_num_seqs=8)
    submit(forked, prompt_of(37), 20, **sampled)
    outputs = [tokens_of(output) for output in outputs_of(forked).values()]
    assert len({tuple(output) for output in outputs}) == 3
    first = submit(crowded, prompt_of(37), 20, **sampled)
    submit(crowded, prompt_of(50, seed=2), 20, **sampled)
    again = outputs_of(crowded)
    assert [tokens_of(again[first, index]) for index in range(3)] == outputs


def test_a_block_takes_what_the_pools_have_and_is_of_its_own_type(dtype: str, qwen3: Path) -> None:
    settings: dict[str, Any] = {"model": str(qwen3), "device": "cpu", "kv_cache_memory": 10**6}
    loaded, exact = (load_engine(EngineConfig(**settings, kv_cache_dtype=kind)) for kind in (dtype, "auto"))
    pools = loaded.runner.kv_pools  # type: ignore[attr-defined]
    assert loaded.engine.bytes_per_block == sum(pool[0].nbytes for pool in pools) == BYTES_PER_BLOCK
    assert loaded.kv_size.num_blocks == len(pools[0]) == 10**6 // BYTES_PER_BLOCK
    assert (loaded.kv_dtype, exact.kv_dtype) == (dtype, "float32"), "the names of its blocks begin with it"
    assert loaded.model_fingerprint == exact.model_fingerprint


@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_tokens_stay_near_those_of_an_exact_cache(dtype: str, computed: str, qwen3: Path) -> None:
    engine = make_engine(dtype, deterministic=False, dtype=computed)
    prompts = [prompt_of(length) for length in range(5, 37)]
    requests = [submit(engine, prompt, 1) for prompt in prompts]
    tokens = run(engine)
    pairs = zip(requests, prompts, strict=True)
    agreeing = sum(tokens[key][0] == [*reference_greedy(qwen3, prompt, 1).tokens] for key, prompt in pairs)
    assert agreeing >= 0.8 * len(prompts)
