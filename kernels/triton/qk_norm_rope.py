"""The Triton kernel between a layer's first projection and attention: head norms, rotary embedding and KV write in one.

Rounds where the separate kernels round (elementwise.py, cache_ops.py).

Shapes: T tokens, N query heads, K kv heads, X = N + 2 K, D head size, H half a head. P tokens a block, B blocks in the
pool, S positions.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from blockyard.kernels.triton.cache_ops import load_heads, store_heads


@triton.jit
def _rotated_heads(
    x_ptr,
    stride_x,
    norm_ptr,
    eps,
    cos_H,
    sin_H,
    NORMED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    HALF_DIM: tl.constexpr,
):
    """Return all heads of one token, normalised and rotated, as halves in x's type."""
    first_NH, second_NH = load_heads(x_ptr, stride_x, NUM_HEADS, HEADS_POW2, HALF_DIM)
    first_NH, second_NH = first_NH.to(tl.float32), second_NH.to(tl.float32)
    if NORMED:
        squares_N = tl.sum(first_NH * first_NH, axis=1) + tl.sum(second_NH * second_NH, axis=1)
        inverse_N1 = (1.0 / tl.sqrt(squares_N / (2 * HALF_DIM) + eps))[:, None]
        weight_ptrs_H = norm_ptr + tl.arange(0, HALF_DIM)
        first_weight_H, second_weight_H = tl.load(weight_ptrs_H), tl.load(weight_ptrs_H + HALF_DIM)
        first_NH = _scaled(first_NH * inverse_N1, first_weight_H, x_ptr.dtype.element_ty)
        second_NH = _scaled(second_NH * inverse_N1, second_weight_H, x_ptr.dtype.element_ty)
    rotated_first_NH = first_NH * cos_H[None, :] - second_NH * sin_H[None, :]
    rotated_second_NH = second_NH * cos_H[None, :] + first_NH * sin_H[None, :]
    return rotated_first_NH.to(x_ptr.dtype.element_ty), rotated_second_NH.to(x_ptr.dtype.element_ty)


@triton.jit
def _scaled(normed_NH, weight_H, TYPE: tl.constexpr):
    """Return normed * weight in fp32, both rounded to TYPE. With an fp32 weight only the product is."""
    if weight_H.dtype != tl.float32:
        normed_NH = normed_NH.to(TYPE).to(tl.float32)
    return (normed_NH * weight_H.to(tl.float32)[None, :]).to(TYPE).to(tl.float32)


@triton.jit
def qk_norm_rope_write_kernel(
    heads_ptr,  # [T, X, D], strides (stride_t, stride_x, 1): queries, keys, values
    q_norm_ptr,  # [D], only with NORMED
    k_norm_ptr,  # [D], only with NORMED
    cos_sin_ptr,  # [S, D], fp32, contiguous: D / 2 cosines, D / 2 sines
    positions_ptr,  # [T], int64
    pool_ptr,  # as `cache_ops.write_kv_kernel`'s
    scales_ptr,  # as `cache_ops.write_kv_kernel`'s
    slots_ptr,  # [T], int64, negative for padding
    stride_t,
    stride_x,
    eps,
    NORMED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_POW2: tl.constexpr,
    HALF_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """q = rotate(norm(q)) in place; the pool gets rotate(norm(k)) and v at the token's slot. SCALE_BYTES as in
    cache_ops.py.

    Grid (T,): a program has one token, all heads. One thread has both halves of a pair, so queries may be written where
    they are read. Bytes: (2 N + 2 K) * D * itemsize + 2 * K * D * the pool's itemsize a token. FLOPs: 3 * (N + K) * D,
    with norms 7 * (N + K) * D.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    half_H = tl.arange(0, HALF_DIM)
    cos_ptrs_H = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF_DIM) + half_H
    cos_H = tl.load(cos_ptrs_H)
    sin_H = tl.load(cos_ptrs_H + HALF_DIM)

    q_ptr = heads_ptr + token * stride_t
    first_NH, second_NH = _rotated_heads(
        q_ptr, stride_x, q_norm_ptr, eps, cos_H, sin_H, NORMED, NUM_HEADS, HEADS_POW2, HALF_DIM
    )
    head_N = tl.arange(0, HEADS_POW2)
    q_ptrs_NH = q_ptr + head_N[:, None] * stride_x + half_H[None, :]
    mask_N1 = (head_N < NUM_HEADS)[:, None]
    tl.store(q_ptrs_NH, first_NH, mask=mask_N1)
    tl.store(q_ptrs_NH + HALF_DIM, second_NH, mask=mask_N1)

    if slot < 0:
        return
    k_ptr = q_ptr + NUM_HEADS * stride_x
    first_KH, second_KH = _rotated_heads(
        k_ptr, stride_x, k_norm_ptr, eps, cos_H, sin_H, NORMED, NUM_KV_HEADS, KV_HEADS_POW2, HALF_DIM
    )
    store_heads(
        first_KH, second_KH, pool_ptr, scales_ptr, slot, 0, NUM_KV_HEADS, KV_HEADS_POW2, HALF_DIM, BLOCK_SIZE,
        SCALE_BYTES,
    )  # fmt: skip
    v_ptr = k_ptr + NUM_KV_HEADS * stride_x
    first_KH, second_KH = load_heads(v_ptr, stride_x, NUM_KV_HEADS, KV_HEADS_POW2, HALF_DIM)
    store_heads(
        first_KH, second_KH, pool_ptr, scales_ptr, slot, 1, NUM_KV_HEADS, KV_HEADS_POW2, HALF_DIM, BLOCK_SIZE,
        SCALE_BYTES,
    )  # fmt: skip
