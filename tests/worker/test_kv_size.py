"""The arithmetic of KV memory."""

from blockyard.worker.kv_size import KVSize, blocks_in_budget, bytes_per_block

BLOCK_BYTES = bytes_per_block(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype_bytes=2)


def test_a_block_of_an_8b_model_is_2_mib() -> None:
    print(f"32 layers, 8 kv heads, D 128, fp16, 16 tokens: {BLOCK_BYTES:,} bytes a block")
    assert BLOCK_BYTES == 2_097_152


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
