"""Triton kernels of paged attention: one works through items, one merges the partial results of splits.

Owns the kernels alone: ../attention/items.py says what an item is, backend.py launches. Both kernels walk the block
table with an online softmax, so no dense copy of keys or values is ever made. Addresses into the pool are int64.

Shapes: T tokens, R rows, N query heads, K kv heads, G = N / K heads of a group, D head size. P tokens a block, B blocks
in the pool, S partial slots. M packed query rows of a program, J keys of a tile, U splits merged at a time.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from blockyard.kernels.triton.numbers.quantised_heads import load_scales, widened


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):
    """Return a @ b in fp32. WIDEN converts bf16 to fp32 first, because the interpreter would multiply its bit
    patterns."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def table_entries(
    table_ptr, first_key, end_key, BLOCK_SIZE: tl.constexpr, BLOCK_J: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return the blocks [J] of the keys first_key .. first_key + BLOCK_J - 1, and block 0 from end_key on."""
    step_J = tl.arange(0, BLOCK_J)
    if ALIGNED:
        entry_ptrs_J = table_ptr + first_key // BLOCK_SIZE + step_J // BLOCK_SIZE
    else:
        entry_ptrs_J = table_ptr + (first_key + step_J) // BLOCK_SIZE
    return tl.load(entry_ptrs_J, mask=first_key + step_J < end_key, other=0)


@triton.jit
def attend_tile(
    q_MD,
    query_position_M,
    acc_MD,
    peak_M,
    total_M,
    pool_ptr,
    scales_ptr,
    block_J,
    first_key,
    end_key,
    kv_head,
    scale_log2,
    window,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK_J: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Take one online-softmax step over the keys first_key .. first_key + BLOCK_J - 1 in the blocks `block_J`.

    With SCALE_BYTES, stored numbers are multiplied as they are. Scores and weights are then multiplied by the scales of
    their keys and values: one product a key, not one an element. Such weights may be too small for fp16, so they become
    bf16.

    MASKED hides keys from end_key on, CAUSAL those behind a row's query, and WINDOWED those before its window.

    Unwritten slots may hold NaN, so masked values are loaded as 0: a probability of 0 alone does not hide them. Under a
    window a row may see no key of the first tiles. Its peak is -inf until it sees one, and -inf minus -inf must never
    be computed.
    """
    key_J = first_key + tl.arange(0, BLOCK_J)
    dim_D = tl.arange(0, HEAD_DIM)
    row_size: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + SCALE_BYTES)
    if ALIGNED:
        slot_J = (first_key % BLOCK_SIZE if BLOCK_SIZE > BLOCK_J else 0) + tl.arange(0, BLOCK_J) % BLOCK_SIZE
    else:
        slot_J = key_J % BLOCK_SIZE
    block_size: tl.constexpr = 2 * NUM_KV_HEADS * row_size
    offsets_JD = (kv_head * row_size + slot_J * HEAD_DIM)[:, None] + dim_D[None, :]
    k_ptrs_JD = pool_ptr + offsets_JD + (block_J.to(tl.int64) * block_size)[:, None]
    v_ptrs_JD = k_ptrs_JD + NUM_KV_HEADS * row_size
    k_JD = tl.load(k_ptrs_JD)
    v_JD = tl.load(v_ptrs_JD, mask=(key_J < end_key)[:, None], other=0.0) if MASKED else tl.load(v_ptrs_JD)
    if SCALE_BYTES:
        row_scales: tl.constexpr = row_size // SCALE_BYTES
        first_scale = kv_head * row_scales + (row_scales - BLOCK_SIZE)
        k_scale_ptrs_J = (
            scales_ptr + first_scale + slot_J + block_J.to(tl.int64) * (2 * NUM_KV_HEADS * row_scales)
        )
        is_read_J = (key_J < end_key) if MASKED else tl.full([BLOCK_J], True, tl.int1)
        k_scale_J, v_scale_J = load_scales(
            k_scale_ptrs_J, NUM_KV_HEADS * row_scales, is_read_J, BLOCK_J, q_MD.shape[0] >= 64
        )
        exact: tl.constexpr = tl.float32 if WIDEN else q_MD.dtype
        k_JD = widened(k_JD, exact, False)
        v_JD = widened(v_JD, tl.bfloat16 if exact == tl.float16 else exact, True)
    scores_MJ = _dot(q_MD, tl.trans(k_JD), WIDEN)
    if SCALE_BYTES:
        scores_MJ *= k_scale_J[None, :]
    if MASKED:
        visible_MJ = (key_J < end_key)[None, :]
        if CAUSAL:
            visible_MJ = visible_MJ & (key_J[None, :] <= query_position_M[:, None])
        if WINDOWED:
            visible_MJ = visible_MJ & (key_J[None, :] > query_position_M[:, None] - window)
        scores_MJ = tl.where(visible_MJ, scores_MJ, float("-inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(scores_MJ, axis=1) * scale_log2)
    shift_M = new_peak_M
    if MASKED and WINDOWED:
        shift_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    rescale_M = tl.exp2(peak_M - shift_M)
    weights_MJ = tl.exp2(tl.fma(scores_MJ, scale_log2, -shift_M[:, None]))
    if len(total_M.shape) == 2:
        total_M = total_M * rescale_M[:, None] + weights_MJ
    else:
        total_M = total_M * rescale_M + tl.sum(weights_MJ, axis=1)
    acc_MD = acc_MD * rescale_M[:, None]
    if SCALE_BYTES:
        weights_MJ *= v_scale_J[None, :]
    acc_MD += _dot(weights_MJ.to(v_JD.dtype), v_JD, WIDEN)
    return acc_MD, new_peak_M, total_M


@triton.jit
def attend_keys(
    q_MD,
    query_position_M,
    acc_MD,
    peak_M,
    total_M,
    pool_ptr,
    scales_ptr,
    table_ptr,
    first_key,
    until_key,
    end_key,
    kv_head,
    scale_log2,
    window,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK_J: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Take online-softmax steps over the keys from first_key up to until_key, a tile each.

    A step loads the table's entries of the next tile. The loads of keys and values then depend on a register, not on a
    load of the same step, and the compiler keeps one tile more in flight.
    """
    block_J = table_entries(table_ptr, first_key, end_key, BLOCK_SIZE, BLOCK_J, ALIGNED)
    for tile in range(first_key, until_key, BLOCK_J):
        next_block_J = table_entries(table_ptr, tile + BLOCK_J, end_key, BLOCK_SIZE, BLOCK_J, ALIGNED)
        acc_MD, peak_M, total_M = attend_tile(
            q_MD, query_position_M, acc_MD, peak_M, total_M, pool_ptr, scales_ptr, block_J, tile, end_key, kv_head,
            scale_log2, window, MASKED, CAUSAL, WINDOWED, ALIGNED, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE_BYTES,
            BLOCK_J, WIDEN,
        )  # fmt: skip
        block_J = next_block_J
    return acc_MD, peak_M, total_M


@triton.jit(do_not_specialize=["window"])
def attend_items_kernel(
    q_ptr,  # [T, N, D], strides (q_stride_t, q_stride_n, 1)
    pool_ptr,  # [B, 2, K, P, D], contiguous; quantised, int8 or e4m3 (also as bits), with scales behind each P heads
    scales_ptr,  # the same memory as fp32, only with SCALE_BYTES
    table_ptr,  # [R, blocks], int32, contiguous
    query_starts_ptr,  # [R + 1], int32
    context_lens_ptr,  # [R], int32
    items_ptr,  # [items, 6], int32
    out_ptr,  # [T, N, D], strides (out_stride_t, out_stride_n, 1)
    partial_out_ptr,  # [S, N, D], fp32, contiguous
    partial_lse_ptr,  # [S, N], fp32, contiguous, in units of log2
    q_stride_t,
    q_stride_n,
    out_stride_t,
    out_stride_n,
    table_stride_r,
    scale_log2,  # scale * log2(e)
    window,  # tokens, only with WINDOWED
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    PROGRAMS_PER_ITEM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    DECODES: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out = softmax(scale q k^T, causal, within the window) v, for the queries and keys of one item.

    Grid (items * PROGRAMS_PER_ITEM, K). The G query heads of a kv head are packed under each other. Packed row m of an
    item is query token m // G and head m % G, so one read of the keys serves the whole group. A program takes BLOCK_M
    packed rows: first all tiles that every row sees, without a mask, then the diagonal. A split (partial slot >= 0, one
    query token only) leaves its normalised result and log-sum-exp for the merge.

    DECODES is for items of one query token. Their rows come first in a step, so a row is its own token. Every packed
    row sees all keys of the item. One loop masks each of its tiles, because a second one for the last tile would begin
    its loads after the first has ended.

    WINDOWED is for items of several query tokens. Their windows begin one key after the other. A program skips the keys
    that none of its rows sees. It masks the tiles in which one row's window begins after another's. An item of one
    query token begins with its window, as the plan cut it, and needs neither.

    Bytes: 2 * keys * (D * the pool's itemsize + SCALE_BYTES) a program and kv head, plus q and out. FLOPs: 4 * N * D a
    visible (query, key) pair.
    """
    item_ptr = items_ptr + (tl.program_id(0) // PROGRAMS_PER_ITEM) * 6
    kv_head = tl.program_id(1)
    row = tl.load(item_ptr)
    first_token = tl.load(item_ptr + 1)
    end_token = tl.load(item_ptr + 2)
    first_key = tl.load(item_ptr + 3)
    end_key = tl.load(item_ptr + 4)
    partial_slot = tl.load(item_ptr + 5).to(tl.int64)
    first_packed = first_token * GROUP + (tl.program_id(0) % PROGRAMS_PER_ITEM) * BLOCK_M
    if first_packed >= end_token * GROUP:
        return
    if DECODES:
        query_start = row
        first_position = end_key - 1
    else:
        query_start = tl.load(query_starts_ptr + row)
        first_position = tl.load(context_lens_ptr + row) - (tl.load(query_starts_ptr + row + 1) - query_start)

    packed_M = first_packed + tl.arange(0, BLOCK_M)
    token_M = packed_M // GROUP
    head_M = (kv_head * GROUP + packed_M % GROUP).to(tl.int64)
    valid_M = token_M < end_token
    query_position_M = first_position + token_M
    dim_D = tl.arange(0, HEAD_DIM)
    global_token_M = (query_start + token_M).to(tl.int64)
    q_offsets_MD = (global_token_M * q_stride_t + head_M * q_stride_n)[:, None] + dim_D[None, :]
    q_MD = tl.load(q_ptr + q_offsets_MD, mask=valid_M[:, None], other=0.0)

    acc_MD = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    peak_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_table_ptr = table_ptr + row.to(tl.int64) * table_stride_r
    if DECODES:
        total_MJ = tl.zeros([BLOCK_M, BLOCK_J], dtype=tl.float32)
        acc_MD, peak_M, total_MJ = attend_keys(
            q_MD, query_position_M, acc_MD, peak_M, total_MJ, pool_ptr, scales_ptr, row_table_ptr, first_key, end_key,
            end_key, kv_head, scale_log2, window, True, False, False, ALIGNED, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_SIZE, SCALE_BYTES, BLOCK_J, WIDEN,
        )  # fmt: skip
        total_M = tl.sum(total_MJ, axis=1)
    else:
        last_token = tl.minimum((first_packed + BLOCK_M - 1) // GROUP, end_token - 1)
        end_key = tl.minimum(end_key, first_position + last_token + 1)
        first_unmasked = first_key
        if WINDOWED:
            first_key = tl.maximum(first_key, first_position + first_packed // GROUP - window + 1)
            behind = tl.maximum(first_position + last_token - window + 1 - first_key, 0)
            first_unmasked = first_key + tl.cdiv(behind, BLOCK_J) * BLOCK_J
        seen_by_all = tl.minimum(end_key, first_position + first_packed // GROUP + 1) - first_key
        masked_from = first_key + tl.maximum(seen_by_all, 0) // BLOCK_J * BLOCK_J
        if WINDOWED:
            acc_MD, peak_M, total_M = attend_keys(
                q_MD, query_position_M, acc_MD, peak_M, total_M, pool_ptr, scales_ptr, row_table_ptr, first_key,
                tl.minimum(first_unmasked, end_key), end_key, kv_head, scale_log2, window, True, True, True, ALIGNED,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE_BYTES, BLOCK_J, WIDEN,
            )  # fmt: skip
        acc_MD, peak_M, total_M = attend_keys(
            q_MD, query_position_M, acc_MD, peak_M, total_M, pool_ptr, scales_ptr, row_table_ptr, first_unmasked,
            masked_from, end_key, kv_head, scale_log2, window, False, False, False, ALIGNED, NUM_KV_HEADS,
            HEAD_DIM, BLOCK_SIZE, SCALE_BYTES, BLOCK_J, WIDEN,
        )  # fmt: skip
        acc_MD, peak_M, total_M = attend_keys(
            q_MD, query_position_M, acc_MD, peak_M, total_M, pool_ptr, scales_ptr, row_table_ptr,
            tl.maximum(first_unmasked, masked_from), end_key, end_key, kv_head, scale_log2, window, True, True, False,
            ALIGNED, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE_BYTES, BLOCK_J, WIDEN,
        )  # fmt: skip

    # An item without keys has a total of 0: its result is 0 and its log-sum-exp -inf, never NaN.
    empty_M = total_M == 0.0
    result_MD = acc_MD / tl.where(empty_M, 1.0, total_M)[:, None]
    if partial_slot < 0:
        out_offsets_MD = (global_token_M * out_stride_t + head_M * out_stride_n)[:, None] + dim_D[None, :]
        tl.store(out_ptr + out_offsets_MD, result_MD.to(out_ptr.dtype.element_ty), mask=valid_M[:, None])
    else:
        partial_M = partial_slot * (NUM_KV_HEADS * GROUP) + head_M
        lse_M = tl.where(empty_M, float("-inf"), peak_M + tl.log2(tl.where(empty_M, 1.0, total_M)))
        tl.store(partial_lse_ptr + partial_M, lse_M, mask=valid_M)
        partial_offsets_MD = partial_M[:, None] * HEAD_DIM + dim_D[None, :]
        tl.store(partial_out_ptr + partial_offsets_MD, result_MD, mask=valid_M[:, None])


@triton.jit
def merge_partials_kernel(
    partial_out_ptr,  # [S, N, D], fp32, contiguous
    partial_lse_ptr,  # [S, N], fp32, contiguous, in units of log2
    partial_starts_ptr,  # [decode rows + 1], int32
    query_starts_ptr,  # [R + 1], int32
    out_ptr,  # [T, N, D], strides (out_stride_t, out_stride_n, 1)
    out_stride_t,
    out_stride_n,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """out = sum_u 2^(lse_u - peak) partial_u / sum_u 2^(lse_u - peak), over the splits u of one decode row.

    Grid (decode rows, N). A program takes BLOCK_U splits at a time. A row that was not split has none, and the kernel
    does not write it. Empty splits carry -inf: they weigh 0, and -inf - -inf is never computed.

    Bytes: 4 * (D + 1) a split and head, plus out. FLOPs: 2 * D a split and head.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    first_slot = tl.load(partial_starts_ptr + row)
    end_slot = tl.load(partial_starts_ptr + row + 1)
    if first_slot == end_slot:
        return
    dim_D = tl.arange(0, HEAD_DIM)
    acc_D = tl.zeros([HEAD_DIM], dtype=tl.float32)
    # Starting from the lowest finite number keeps the difference to a peak of -inf defined.
    peak = -3.0e38
    total = 0.0
    for slot in range(first_slot, end_slot, BLOCK_U):
        slot_U = slot + tl.arange(0, BLOCK_U)
        partial_U = slot_U.to(tl.int64) * NUM_HEADS + head
        lse_U = tl.load(partial_lse_ptr + partial_U, mask=slot_U < end_slot, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(lse_U, axis=0))
        weight_U = tl.exp2(lse_U - new_peak)
        rescale = tl.exp2(peak - new_peak)
        offsets_UD = partial_U[:, None] * HEAD_DIM + dim_D[None, :]
        partial_UD = tl.load(partial_out_ptr + offsets_UD, mask=(slot_U < end_slot)[:, None], other=0.0)
        acc_D = acc_D * rescale + tl.sum(partial_UD * weight_U[:, None], axis=0)
        total = total * rescale + tl.sum(weight_U, axis=0)
        peak = new_peak
    token = tl.load(query_starts_ptr + row).to(tl.int64)
    out_ptrs_D = out_ptr + token * out_stride_t + head * out_stride_n + dim_D
    result_D = acc_D / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptrs_D, result_D.to(out_ptr.dtype.element_ty))
