"""KV size: bytes of a block, blocks in a budget, requests that fit. Pure arithmetic."""

from dataclasses import dataclass
from typing import Literal

KVCacheDtype = Literal["auto", "int8", "fp8"]
"""The data type of stored keys and values. `auto`: the data type that the model computes in."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTISED_BYTES = {"int8": 1, "fp8": 1}
SCALE_BYTES = 4
"""Bytes beside each quantised head of keys or values (kernels/kv_pool.py)."""


def stored_dtype(kv_cache_dtype: KVCacheDtype, dtype: str) -> str:
    """Return the name of the data type of stored keys and values, for a model that computes in `dtype`."""
    return dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def bytes_per_block(
    *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, kv_dtype: str
) -> int:
    """Return the bytes of keys and values of `block_size` tokens in all layers, stored as `stored_dtype` says."""
    if kv_dtype in QUANTISED_BYTES:
        head_bytes = head_dim * QUANTISED_BYTES[kv_dtype] + SCALE_BYTES
    else:
        head_bytes = head_dim * DTYPE_BYTES[kv_dtype]
    return 2 * num_layers * num_kv_heads * block_size * head_bytes


def blocks_in_budget(budget_bytes: int, block_bytes: int) -> int:
    """Return how many whole blocks fit. None fit if the budget is negative."""
    return max(0, budget_bytes // block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSize:
    """One worker's KV pool. `block_size` is in tokens."""

    num_blocks: int
    block_size: int
    block_bytes: int
    draft_bytes: int = 0
    """Bytes of a draft model's pool beside it, which no other size here counts."""

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def max_concurrency(self, max_model_len: int) -> float:
        """Return how many requests of `max_model_len` tokens fit at once, sharing nothing."""
        return self.num_blocks / self.blocks_for(max_model_len)

    def describe(self, max_model_len: int) -> tuple[str, ...]:
        """Return the lines that a worker logs when it starts."""
        return (
            f"KV cache: {self.num_tokens:,} tokens in {self.num_blocks:,} blocks of {self.block_size}, "
            f"{self.block_bytes:,} bytes a block, {self.total_bytes / 2**30:.2f} GiB",
            f"maximum concurrency for requests of {max_model_len:,} tokens: "
            f"{self.max_concurrency(max_model_len):.2f}",
        )


def kv_size_in(
    budget_bytes: int, *, block_size: int, block_bytes: int, draft_block_bytes: int = 0, max_num_seqs: int = 0
) -> KVSize:
    """Return the size of the pool that a budget holds, beside that of a draft model where `draft_block_bytes` is not 0.

    The draft model's pool has as many blocks, and a spare one for each of `max_num_seqs` sequences.
    """
    spare_bytes = max_num_seqs * draft_block_bytes
    num_blocks = blocks_in_budget(budget_bytes - spare_bytes, block_bytes + draft_block_bytes)
    return KVSize(
        num_blocks=num_blocks,
        block_size=block_size,
        block_bytes=block_bytes,
        draft_bytes=num_blocks * draft_block_bytes + spare_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSize:
    """One worker's blocks in host memory."""

    swap_blocks: int
    """Blocks for preempted sequences."""
    cache_blocks: int
    """Blocks for prefixes that the pool has evicted."""
    block_bytes: int

    @property
    def num_blocks(self) -> int:
        return self.swap_blocks + self.cache_blocks

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def describe(self) -> str:
        """Return the line that a worker logs when it starts."""
        swap_gib, cache_gib = (
            count * self.block_bytes / 2**30 for count in (self.swap_blocks, self.cache_blocks)
        )
        return (
            f"host memory: swap space of {self.swap_blocks:,} blocks, {swap_gib:.2f} GiB; "
            f"prefix cache of {self.cache_blocks:,} blocks, {cache_gib:.2f} GiB"
        )


def host_size(*, swap_bytes: int, cache_bytes: int, block_bytes: int) -> HostSize:
    """Return the blocks in two budgets. Raises ValueError for a budget above 0 that holds no block."""
    sizes = {"swap space": swap_bytes, "the host cache": cache_bytes}
    for name, budget in sizes.items():
        if budget and not blocks_in_budget(budget, block_bytes):
            raise ValueError(f"{name} of {budget} bytes holds no block of {block_bytes} bytes")
    return HostSize(
        swap_blocks=blocks_in_budget(swap_bytes, block_bytes),
        cache_blocks=blocks_in_budget(cache_bytes, block_bytes),
        block_bytes=block_bytes,
    )
