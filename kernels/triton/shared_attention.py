"""The Triton kernel of cascade attention: it reads a prefix that many decode rows share once for all of them.

Owns the kernel alone. ../attention/shared_prefix.py says which rows share which keys, and backend.py launches. The
merge of attention.py joins its partial results with those of what each row reads alone.

Shapes: T tokens, R rows, N query heads, K kv heads, G = N / K heads of a group, D head size. P tokens a block, B blocks
in the pool, S partial slots. M packed query rows of a program, Y items, J keys of a tile.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from blockyard.kernels.triton.attention import attend_keys


@triton.jit
def attend_shared_kernel(
    q_ptr,  # [T, N, D], strides (q_stride_t, q_stride_n, 1)
    pool_ptr,  # as `attention.attend_items_kernel`'s
    scales_ptr,  # as `attention.attend_items_kernel`'s
    table_ptr,  # [R, blocks], int32, contiguous
    members_ptr,  # [members of all groups], int32: rows, which are tokens too
    items_ptr,  # [Y, 5], int32
    partial_starts_ptr,  # [decode rows + 1], int32
    partial_out_ptr,  # [S, N, D], fp32, contiguous
    partial_lse_ptr,  # [S, N], fp32, contiguous, in units of log2
    q_stride_t,
    q_stride_n,
    table_stride_r,
    scale_log2,  # scale * log2(e)
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    PROGRAMS_PER_ITEM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """partial[slot of a member] = softmax(scale q k^T) v over the keys of one item, with its log-sum-exp.

    Grid (Y * PROGRAMS_PER_ITEM, K). Packed row m of an item is member m // G and head m % G, as tokens are elsewhere.
    Every member sees every key, so only the tile in which the range ends is masked. Decode rows come first in a step: a
    row is its own token.

    Bytes: 2 * keys * (D * the pool's itemsize + SCALE_BYTES) a program and kv head, plus q and 4 * (D + 1) a packed
    row. FLOPs: 4 * D a packed row and key.
    """
    item_ptr = items_ptr + (tl.program_id(0) // PROGRAMS_PER_ITEM) * 5
    kv_head = tl.program_id(1)
    first_member = tl.load(item_ptr)
    end_member = tl.load(item_ptr + 1)
    first_key = tl.load(item_ptr + 2)
    end_key = tl.load(item_ptr + 3)
    split = tl.load(item_ptr + 4)
    first_packed = first_member * GROUP + (tl.program_id(0) % PROGRAMS_PER_ITEM) * BLOCK_M
    if first_packed >= end_member * GROUP:
        return

    packed_M = first_packed + tl.arange(0, BLOCK_M)
    member_M = packed_M // GROUP
    valid_M = member_M < end_member
    row_M = tl.load(members_ptr + member_M, mask=valid_M, other=0).to(tl.int64)
    head_M = (kv_head * GROUP + packed_M % GROUP).to(tl.int64)
    dim_D = tl.arange(0, HEAD_DIM)
    q_offsets_MD = (row_M * q_stride_t + head_M * q_stride_n)[:, None] + dim_D[None, :]
    q_MD = tl.load(q_ptr + q_offsets_MD, mask=valid_M[:, None], other=0.0)

    acc_MD = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    peak_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    first_row = tl.load(members_ptr + first_member).to(tl.int64)
    row_table_ptr = table_ptr + first_row * table_stride_r
    masked_from = first_key + (end_key - first_key) // BLOCK_J * BLOCK_J
    acc_MD, peak_M, total_M = attend_keys(
        q_MD, member_M, acc_MD, peak_M, total_M, pool_ptr, scales_ptr, row_table_ptr, first_key, masked_from,
        end_key, kv_head, scale_log2, 0, False, False, False, True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        SCALE_BYTES, BLOCK_J, WIDEN,
    )  # fmt: skip
    acc_MD, peak_M, total_M = attend_keys(
        q_MD, member_M, acc_MD, peak_M, total_M, pool_ptr, scales_ptr, row_table_ptr, masked_from, end_key,
        end_key, kv_head, scale_log2, 0, True, False, False, True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        SCALE_BYTES, BLOCK_J, WIDEN,
    )  # fmt: skip

    slot_M = tl.load(partial_starts_ptr + row_M, mask=valid_M, other=0).to(tl.int64) + split
    partial_M = slot_M * (NUM_KV_HEADS * GROUP) + head_M
    tl.store(partial_lse_ptr + partial_M, peak_M + tl.log2(total_M), mask=valid_M)
    partial_offsets_MD = partial_M[:, None] * HEAD_DIM + dim_D[None, :]
    tl.store(partial_out_ptr + partial_offsets_MD, acc_MD / total_M[:, None], mask=valid_M[:, None])
