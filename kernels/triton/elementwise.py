"""Triton kernels besides attention: RMS norm with and without residual, rotary embedding, SiLU-mul, GELU-mul.

All compute in fp32 and round where Hugging Face's Llama rounds. All are bound by memory, with a few FLOPs an element.

Shapes: T tokens (rows), N query heads, K kv heads, D head size. H hidden size, I intermediate size, S positions, M rows
of a program.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,  # [T, H], strides (x_stride_t, 1)
    residual_ptr,  # [T, H], strides (residual_stride_t, 1), only with HAS_RESIDUAL or ADDS_AFTER
    weight_ptr,  # [H], in x's type or fp32
    out_ptr,  # [T, H], strides (out_stride_t, 1), may be x
    num_rows,
    x_stride_t,
    residual_stride_t,
    out_stride_t,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ADDS_AFTER: tl.constexpr,
    HIDDEN: tl.constexpr,
    HIDDEN_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """out = (y / sqrt(mean(y^2) + eps), rounded) * weight, with y = x, or y = residual = residual + x, rounded.

    With ADDS_AFTER instead residual += out of y = x, and nothing else is written. An fp32 weight rounds once.

    Grid (ceil(T / BLOCK_M),): a program takes BLOCK_M whole rows, many where rows are short (the norm of single heads).
    Bytes: 2 * T * H * itemsize, with residual 4 * T * H * itemsize. FLOPs: 4 * T * H.
    """
    row_M = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column_H = tl.arange(0, HIDDEN_POW2)
    mask_MH = (row_M < num_rows)[:, None] & (column_H < HIDDEN)[None, :]
    x_MH = tl.load(x_ptr + row_M[:, None] * x_stride_t + column_H[None, :], mask=mask_MH, other=0.0)
    y_MH = x_MH.to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptrs_MH = residual_ptr + row_M[:, None] * residual_stride_t + column_H[None, :]
        summed_MH = y_MH + tl.load(residual_ptrs_MH, mask=mask_MH, other=0.0).to(tl.float32)
        rounded_MH = summed_MH.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs_MH, rounded_MH, mask=mask_MH)
        y_MH = rounded_MH.to(tl.float32)
    mean_square_M = tl.sum(y_MH * y_MH, axis=1) / HIDDEN
    normed_MH = y_MH * (1.0 / tl.sqrt(mean_square_M + eps))[:, None]
    if weight_ptr.dtype.element_ty != tl.float32:
        normed_MH = normed_MH.to(x_ptr.dtype.element_ty).to(tl.float32)
    weight_H = tl.load(weight_ptr + column_H, mask=column_H < HIDDEN, other=0.0).to(tl.float32)
    result_MH = (normed_MH * weight_H[None, :]).to(out_ptr.dtype.element_ty)
    if ADDS_AFTER:
        sum_ptrs_MH = residual_ptr + row_M[:, None] * residual_stride_t + column_H[None, :]
        sum_MH = tl.load(sum_ptrs_MH, mask=mask_MH, other=0.0).to(tl.float32) + result_MH.to(tl.float32)
        tl.store(sum_ptrs_MH, sum_MH.to(residual_ptr.dtype.element_ty), mask=mask_MH)
    else:
        tl.store(out_ptr + row_M[:, None] * out_stride_t + column_H[None, :], result_MH, mask=mask_MH)


@triton.jit
def _rotate_heads(
    x_ptr, stride_n, cos_H, sin_H, NUM_HEADS: tl.constexpr, HEADS_POW2: tl.constexpr, HALF_DIM: tl.constexpr
):
    """Rotate all heads of one token in place; H is half a head."""
    head_N = tl.arange(0, HEADS_POW2)
    first_ptrs_NH = x_ptr + head_N[:, None] * stride_n + tl.arange(0, HALF_DIM)[None, :]
    mask_N1 = (head_N < NUM_HEADS)[:, None]
    first_NH = tl.load(first_ptrs_NH, mask=mask_N1).to(tl.float32)
    second_NH = tl.load(first_ptrs_NH + HALF_DIM, mask=mask_N1).to(tl.float32)
    rotated_first_NH = first_NH * cos_H[None, :] - second_NH * sin_H[None, :]
    rotated_second_NH = second_NH * cos_H[None, :] + first_NH * sin_H[None, :]
    tl.store(first_ptrs_NH, rotated_first_NH.to(x_ptr.dtype.element_ty), mask=mask_N1)
    tl.store(first_ptrs_NH + HALF_DIM, rotated_second_NH.to(x_ptr.dtype.element_ty), mask=mask_N1)


@triton.jit
def rotary_kernel(
    q_ptr,  # [T, N, D], strides (q_stride_t, q_stride_n, 1)
    k_ptr,  # [T, K, D], strides (k_stride_t, k_stride_k, 1)
    cos_sin_ptr,  # [S, D], fp32, contiguous: D / 2 cosines, D / 2 sines
    positions_ptr,  # [T], int64
    q_stride_t,
    q_stride_n,
    k_stride_t,
    k_stride_k,
    NUM_HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_POW2: tl.constexpr,
    HALF_DIM: tl.constexpr,
):
    """x1, x2 = x1 cos - x2 sin, x2 cos + x1 sin for the halves x1, x2 of each head of q and k, in place.

    Grid (T,): a program rotates all heads of one token. Bytes: 2 * (N + K) * D * itemsize a token. FLOPs: 3 *
    (N + K) * D.
    """
    token = tl.program_id(0).to(tl.int64)
    half_H = tl.arange(0, HALF_DIM)
    cos_ptrs_H = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF_DIM) + half_H
    cos_H = tl.load(cos_ptrs_H)
    sin_H = tl.load(cos_ptrs_H + HALF_DIM)
    _rotate_heads(q_ptr + token * q_stride_t, q_stride_n, cos_H, sin_H, NUM_HEADS, HEADS_POW2, HALF_DIM)
    _rotate_heads(k_ptr + token * k_stride_t, k_stride_k, cos_H, sin_H, NUM_KV_HEADS, KV_HEADS_POW2, HALF_DIM)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [T, 2 I], strides (gate_up_stride_t, 1)
    out_ptr,  # [T, I], strides (out_stride_t, 1)
    width,
    gate_up_stride_t,
    out_stride_t,
    GELU: tl.constexpr,
    TILE: tl.constexpr,
):
    """out = gate / (1 + e^-u) * up, with u = gate. With GELU u = 2 sqrt(2 / pi) (gate + 0.044715 gate^3), which is GELU
    with tanh.

    Grid (T, ceil(I / TILE)): a program takes one tile of one row. Bytes: 3 * T * I * itemsize. FLOPs: 5 * T * I.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    gate_ptrs = gate_up_ptr + token * gate_up_stride_t + column
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    u = gate
    if GELU:
        u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate / (1.0 + tl.exp(-u)) * up
    tl.store(out_ptr + token * out_stride_t + column, result.to(out_ptr.dtype.element_ty), mask=mask)
