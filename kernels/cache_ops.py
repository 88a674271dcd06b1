"""Triton kernels that move keys and values: the write by slot mapping and the copy of whole blocks.

Shapes: T tokens, K kv heads, D head size, P tokens a block, B blocks in the pool, C block copies.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    k_ptr,  # [T, K, D], strides (k_stride_t, k_stride_k, 1)
    v_ptr,  # [T, K, D], strides (v_stride_t, v_stride_k, 1)
    pool_ptr,  # [B, 2, K, P, D], contiguous
    slots_ptr,  # [T], int64, negative for padding
    k_stride_t,
    k_stride_k,
    v_stride_t,
    v_stride_k,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_POW2: tl.constexpr,
):
    """pool[slot // P, 0, :, slot % P] = k[t] and pool[slot // P, 1, :, slot % P] = v[t], for slot = slots[t]
    >= 0.

    Grid (T,): a program moves one token, all kv heads. Bytes: 4 * K * D * itemsize a token. FLOPs: none.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head_K = tl.arange(0, HEADS_POW2)
    dim_D = tl.arange(0, HEAD_DIM)
    mask_K1 = (head_K < NUM_KV_HEADS)[:, None]
    head_row_K = (slot // BLOCK_SIZE) * (2 * NUM_KV_HEADS) + head_K
    pool_KD = (head_row_K * BLOCK_SIZE + slot % BLOCK_SIZE)[:, None] * HEAD_DIM + dim_D[None, :]
    k_ptrs_KD = k_ptr + token * k_stride_t + head_K[:, None] * k_stride_k + dim_D[None, :]
    v_ptrs_KD = v_ptr + token * v_stride_t + head_K[:, None] * v_stride_k + dim_D[None, :]
    tl.store(pool_ptr + pool_KD, tl.load(k_ptrs_KD, mask=mask_K1), mask=mask_K1)
    value_KD = pool_KD + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    tl.store(pool_ptr + value_KD, tl.load(v_ptrs_KD, mask=mask_K1), mask=mask_K1)


@triton.jit
def copy_blocks_kernel(
    pool_ptr,  # [B, block_numel], contiguous
    src_dst_ptr,  # [C, 2], int64, contiguous
    block_numel,
    TILE: tl.constexpr,
):
    """pool[dst] = pool[src] for each pair (src, dst); no destination may be named twice or be a source.

    Grid (C, ceil(block_numel / TILE)): a program moves one tile of one block, keys and values alike.
    Bytes: 2 * block_numel * itemsize a pair. FLOPs: none.
    """
    pair_ptr = src_dst_ptr + tl.program_id(0) * 2
    source = tl.load(pair_ptr)
    destination = tl.load(pair_ptr + 1)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offsets < block_numel
    values = tl.load(pool_ptr + source * block_numel + offsets, mask=mask)
    tl.store(pool_ptr + destination * block_numel + offsets, values, mask=mask)
