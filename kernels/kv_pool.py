"""The KV pool of a layer: its shape, and how keys and values are quantised to 8 bits.

A pool is one tensor with blocks as its first dimension, so code that moves blocks moves them whole and ignores the
layout. In the model's data type its shape is [B, 2, K, P, D].

Quantised, its shape is [B, 2, K, P, D + 4] of int8 or float8_e4m3fn. The shape gives the size, not the layout. Each
block stores the keys, or the values, of one kv head as P heads of D numbers. P fp32 scales follow, one for each token.
So heads stay aligned, and the scales of a block's tokens lie side by side.

head = numbers * scale, with scale = largest magnitude / LARGEST, rounded to the nearest number, ties to even. A head
that is not finite gets the scale NaN, so that a reader fails as it does without quantising.

Shapes: B blocks in the pool, K kv heads, P tokens a block, D head size, T tokens. W rows, each one (block, key or
value, kv head).
"""

from typing import Literal

import torch

QuantisedName = Literal["int8", "fp8"]
SCALE_BYTES = 4
QUANTISED_DTYPES: dict[QuantisedName, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
PLAIN_LAYOUT = "plain/1"
"""Name of the layout below, which every backend but the C++ one uses. `store` and `gather` know no other."""
# The number that the largest magnitude of a head becomes.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# The smallest peak for which LARGEST / peak is finite. Heads with a smaller peak are read back too small, down to zero.
SMALLEST_PEAK = 1e-30


def is_quantised(kv_pool: torch.Tensor) -> bool:
    return kv_pool.dtype in LARGEST


def head_dim_of(kv_pool: torch.Tensor) -> int:
    return kv_pool.shape[4] - (SCALE_BYTES if is_quantised(kv_pool) else 0)


def pool_shape(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, ...]:
    width = head_dim + (SCALE_BYTES if dtype in LARGEST else 0)
    return num_blocks, 2, num_kv_heads, block_size, width


def movable(kv_pool: torch.Tensor) -> torch.Tensor:
    """Return a view of the pool in a type that PyTorch copies by index on every device. Some devices do not take
    fp8."""
    return kv_pool.view(torch.int8) if is_quantised(kv_pool) else kv_pool


def numbers_of(kv_pool: torch.Tensor) -> torch.Tensor:
    """Return a view of a quantised pool's heads [B, 2, K, P, D] without their scales."""
    block_size, head_dim = kv_pool.shape[3], head_dim_of(kv_pool)
    rows = kv_pool.flatten(3)[..., : block_size * head_dim]
    return rows.view(*rows.shape[:3], block_size, head_dim)


def scales_of(kv_pool: torch.Tensor) -> torch.Tensor:
    """Return a view of a quantised pool's fp32 scales [B, 2, K, P]."""
    return movable(kv_pool).flatten(3)[..., kv_pool.shape[3] * head_dim_of(kv_pool) :].view(torch.float32)


def quantise(heads_TKD: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers [T, K, D] of `dtype` and their fp32 scales [T, K]."""
    wide_TKD = heads_TKD.float()
    peak_TK = wide_TKD.abs().amax(dim=-1)
    numbers_TKD = wide_TKD * (LARGEST[dtype] / peak_TK.clamp(min=SMALLEST_PEAK))[..., None]
    if dtype == torch.int8:
        numbers_TKD = numbers_TKD.round().nan_to_num(0.0)
    # Infinity times 0 is NaN.
    return numbers_TKD.to(dtype), peak_TK / LARGEST[dtype] + peak_TK * 0.0


def store(
    kv_pool: torch.Tensor, kind: int, blocks_T: torch.Tensor, offsets_T: torch.Tensor, heads_TKD: torch.Tensor
) -> None:
    """Write keys (kind 0) or values (1) of some tokens to offsets within blocks. Quantises if the pool is quantised."""
    if not is_quantised(kv_pool):
        kv_pool[blocks_T, kind, :, offsets_T] = heads_TKD
        return
    numbers_TKD, scales_TK = quantise(heads_TKD, kv_pool.dtype)
    movable(numbers_of(kv_pool))[blocks_T, kind, :, offsets_T] = movable(numbers_TKD)
    scales_of(kv_pool)[blocks_T, kind, :, offsets_T] = scales_TK


def gather(kv_pool: torch.Tensor, rows_W: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of heads [W, P, D] from rows of the pool seen as [B * 2 * K, P, D]. A quantised pool is dequantised
    to `dtype`."""
    block_size, head_dim = kv_pool.shape[3], head_dim_of(kv_pool)
    flat = movable(kv_pool).view(-1, block_size * kv_pool.shape[4])
    gathered = flat.index_select(0, rows_W)
    if not is_quantised(kv_pool):
        return gathered.view(-1, block_size, head_dim)
    numbers_WPD = (
        gathered[:, : block_size * head_dim].view(kv_pool.dtype).unflatten(1, (block_size, head_dim))
    )
    scales_WP = gathered[:, block_size * head_dim :].view(torch.float32)
    heads_WPD: torch.Tensor = (numbers_WPD.float() * scales_WP[..., None]).to(dtype)
    return heads_WPD
