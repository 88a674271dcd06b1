"""The arithmetic of KV memory."""

import pytest
from blockyard.worker.memory.kv_size import (
    KVSize,
    blocks_in_budget,
    bytes_per_block,
    host_size,
    stored_dtype,
)

BLOCK_BYTES = bytes_per_block(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, kv_dtype="float16")


def test_a_block_of_an_8b_model_is_2_mib() -> None:
    print(f"32 layers, 8 kv heads, D 128, fp16, 16 tokens: {BLOCK_BYTES:,} bytes a block")
    assert BLOCK_BYTES == 2_097_152


@pytest.mark.parametrize(("head_dim", "factor"), [(64, 1.88), (128, 1.94)])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_8_bits_with_their_scales_hold_nearly_twice_the_tokens_of_16(
    kv_dtype: str, head_dim: int, factor: float
) -> None:
    sizes = [
        bytes_per_block(num_layers=32, num_kv_heads=8, head_dim=head_dim, block_size=16, kv_dtype=dtype)
        for dtype in ("bfloat16", kv_dtype)
    ]
    print(
        f"D {head_dim}: bf16 {sizes[0]:,} bytes a block, {kv_dtype} {sizes[1]:,}, {sizes[0] / sizes[1]:.3f}x"
    )
    assert round(sizes[0] / sizes[1], 2) == factor


def test_what_blocks_hold_is_the_models_type_unless_asked_otherwise() -> None:
    assert stored_dtype("auto", "bfloat16") == "bfloat16"
    assert stored_dtype("fp8", "bfloat16") == "fp8"


def test_60_gb_hold_28610_such_blocks() -> None:
    num_blocks = blocks_in_budget(60 * 10**9, BLOCK_BYTES)
    print(f"60 GB hold {num_blocks:,} blocks")
    assert num_blocks == 28_610


def test_only_whole_blocks_fit() -> None:
    assert [blocks_in_budget(budget, 100) for budget in (-500, 0, 99, 100, 199, 200)] == [0, 0, 0, 1, 1, 2]


def test_concurrency_counts_whole_blocks_a_request() -> None:
    size = KVSize(num_blocks=10, block_size=16, block_bytes=BLOCK_BYTES)
    assert size.num_tokens == 160
    assert [size.blocks_for(tokens) for tokens in (1, 16, 17)] == [1, 1, 2]
    assert size.max_concurrency(17) == 5.0
    assert size.max_concurrency(161) < 1.0


def test_the_start_up_lines_tell_tokens_blocks_bytes_and_concurrency() -> None:
    size = KVSize(num_blocks=28_610, block_size=16, block_bytes=BLOCK_BYTES)
    assert size.describe(8192) == (
        "KV cache: 457,760 tokens in 28,610 blocks of 16, 2,097,152 bytes a block, 55.88 GiB",
        "maximum concurrency for requests of 8,192 tokens: 55.88",
    )


def test_host_memory_is_two_parts_of_whole_blocks() -> None:
    size = host_size(swap_bytes=4 * 2**30, cache_bytes=10**9, block_bytes=BLOCK_BYTES)
    assert (size.swap_blocks, size.cache_blocks) == (2048, 476)
    assert size.describe() == (
        "host memory: swap space of 2,048 blocks, 4.00 GiB; prefix cache of 476 blocks, 0.93 GiB"
    )
    assert host_size(swap_bytes=0, cache_bytes=0, block_bytes=BLOCK_BYTES).num_blocks == 0


def test_host_memory_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match="the host cache of 1000 bytes holds no block of 2097152"):
        host_size(swap_bytes=0, cache_bytes=1000, block_bytes=BLOCK_BYTES)
