"""Triton kernels that move keys and values: the write by slot mapping and the copy of whole blocks.

Shapes: T tokens, K kv heads, D head size, H half a head, P tokens a block, B blocks in the pool, C block copies.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from blockyard.kernels.triton.numbers.quantised_heads import peak_of, quantised, scale_of


@triton.jit
def write_kv_kernel(
    k_ptr,  # [T, K, D], strides (k_stride_t, k_stride_k, 1)
    v_ptr,  # [T, K, D], strides (v_stride_t, v_stride_k, 1)
    pool_ptr,  # [B, 2, K, P, D], contiguous; quantised, int8 or e4m3 (also as bits), with scales behind each P heads
    scales_ptr,  # the same memory as fp32, only with SCALE_BYTES
    slots_ptr,  # [T], int64, negative for padding
    k_stride_t,
    k_stride_k,
    v_stride_t,
    v_stride_k,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HEADS_POW2: tl.constexpr,
):
    """pool[slot // P, 0, :, slot % P] = k[t] and pool[slot // P, 1, :, slot % P] = v[t], for slot = slots[t] >= 0. With
    SCALE_BYTES each head is quantised.

    Grid (T,): a program moves one token, all kv heads. Bytes: 2 * K * D * (itemsize + the pool's) a token. FLOPs: none,
    quantised 4 * K * D.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    k_ptr += token * k_stride_t
    v_ptr += token * v_stride_t
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    first_KH, second_KH = load_heads(k_ptr, k_stride_k, NUM_KV_HEADS, HEADS_POW2, HALF_DIM)
    store_heads(
        first_KH, second_KH, pool_ptr, scales_ptr, slot, 0, NUM_KV_HEADS, HEADS_POW2, HALF_DIM, BLOCK_SIZE, SCALE_BYTES
    )  # fmt: skip
    first_KH, second_KH = load_heads(v_ptr, v_stride_k, NUM_KV_HEADS, HEADS_POW2, HALF_DIM)
    store_heads(
        first_KH, second_KH, pool_ptr, scales_ptr, slot, 1, NUM_KV_HEADS, HEADS_POW2, HALF_DIM, BLOCK_SIZE, SCALE_BYTES
    )  # fmt: skip


@triton.jit
def load_heads(x_ptr, stride_k, NUM_HEADS: tl.constexpr, HEADS_POW2: tl.constexpr, HALF_DIM: tl.constexpr):
    """Load all heads of one token, as halves."""
    head_K = tl.arange(0, HEADS_POW2)
    ptrs_KH = x_ptr + head_K[:, None] * stride_k + tl.arange(0, HALF_DIM)[None, :]
    mask_K1 = (head_K < NUM_HEADS)[:, None]
    return tl.load(ptrs_KH, mask=mask_K1), tl.load(ptrs_KH + HALF_DIM, mask=mask_K1)


@triton.jit
def store_heads(
    first_KH,
    second_KH,
    pool_ptr,
    scales_ptr,
    slot,
    KIND: tl.constexpr,  # 0 keys, 1 values
    NUM_KV_HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    HALF_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """Store all kv heads of one token, as halves, into its slot, with their scales if the pool has them."""
    row_size: tl.constexpr = BLOCK_SIZE * (2 * HALF_DIM + SCALE_BYTES)
    head_K = tl.arange(0, HEADS_POW2)
    mask_K = head_K < NUM_KV_HEADS
    offset = slot % BLOCK_SIZE
    row_K = ((slot // BLOCK_SIZE) * 2 + KIND) * NUM_KV_HEADS + head_K
    first_ptrs_KH = (
        pool_ptr + (row_K * row_size + offset * 2 * HALF_DIM)[:, None] + tl.arange(0, HALF_DIM)[None, :]
    )
    if SCALE_BYTES:
        number: tl.constexpr = pool_ptr.dtype.element_ty
        first_KH, second_KH = first_KH.to(tl.float32), second_KH.to(tl.float32)
        peak_K = tl.maximum(peak_of(first_KH), peak_of(second_KH))
        first_KH, second_KH = quantised(first_KH, peak_K, number), quantised(second_KH, peak_K, number)
        row_scales: tl.constexpr = row_size // SCALE_BYTES
        scale_ptrs_K = scales_ptr + row_K * row_scales + (row_scales - BLOCK_SIZE) + offset
        tl.store(scale_ptrs_K, scale_of(peak_K, number), mask=mask_K)
    tl.store(first_ptrs_KH, first_KH, mask=mask_K[:, None])
    tl.store(first_ptrs_KH + HALF_DIM, second_KH, mask=mask_K[:, None])


@triton.jit
def copy_blocks_kernel(
    pool_ptr,  # [B, block_numel], contiguous
    src_dst_ptr,  # [C, 2], int64, contiguous
    block_numel,
    TILE: tl.constexpr,
):
    """pool[dst] = pool[src] for each pair (src, dst). No destination may be named twice or be a source.

    Grid (C, ceil(block_numel / TILE)): a program moves one tile of one block, keys and values alike. Bytes: 2 *
    block_numel * itemsize a pair. FLOPs: none.
    """
    pair_ptr = src_dst_ptr + tl.program_id(0) * 2
    source = tl.load(pair_ptr)
    destination = tl.load(pair_ptr + 1)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offsets < block_numel
    values = tl.load(pool_ptr + source * block_numel + offsets, mask=mask)
    tl.store(pool_ptr + destination * block_numel + offsets, values, mask=mask)
