"""Triton kernels of LoRA: a grouped shrink and a grouped expand over the items of a plan (kernels/lora.py).

The two passes meet in fp32. Each split of the inputs gives a partial sum of its own. So nothing is added atomically,
and the result is the same each time. An item of no tokens is padding, and its programs end at once.

Shapes: M tokens with an adapter, W items. P parts, R rank, I input size, O output size, X splits of the inputs. T
tokens of an item.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from blockyard.kernels.lora import ITEM_TOKENS, LoraLinear, LoraPlan
from blockyard.kernels.triton.linears.dot import dot
from blockyard.kernels.triton.numbers.devices import check_dense_rows

INPUT_TILE = 128
OUTPUT_TILE = 128
SPLITS = 4
"""Parts of the inputs that programs of a shrink share, so that a decode of few items fills more of a GPU."""
MIN_RANK = 16
"""Least rank of a tile: a tensor core multiplies no fewer."""


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x_ptr,  # [T, I], strides (x_stride_t, 1)
    a_ptr,  # [S, P, R, I]
    ranks_ptr,  # [S], int32
    tokens_ptr,  # [M], int32
    items_ptr,  # [W, 3], int32
    between_ptr,  # [X, M, P, R], fp32
    num_tokens,
    x_stride_t,
    NUM_INPUTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """between = x A^T, for the tokens of one item, one part, and one split of the inputs.

    Grid (W, P, X). Bytes for each item and part: R * I * itemsize of A, and T * I * itemsize of x. FLOPs:
    2 * T * R * I.
    """
    item_ptr = items_ptr + tl.program_id(0) * 3
    slot, first, count = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    if count == 0:
        return
    rank = tl.load(ranks_ptr + slot)
    if rank == 0:
        return
    part, split = tl.program_id(1), tl.program_id(2)
    place_T = tl.arange(0, BLOCK_T)
    rank_R, input_I = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_I)
    token_T = tl.load(tokens_ptr + first + place_T, mask=place_T < count, other=0).to(tl.int64)
    x_ptrs = x_ptr + token_T[:, None] * x_stride_t + input_I[None, :]
    a_row_R = (slot.to(tl.int64) * NUM_PARTS + part) * MAX_RANK + rank_R
    a_ptrs = a_ptr + a_row_R[None, :] * NUM_INPUTS + input_I[:, None]
    sum_TR = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for start in range(split * BLOCK_I, NUM_INPUTS, SPLITS * BLOCK_I):
        is_input_I = start + input_I < NUM_INPUTS
        x_TI = tl.load(x_ptrs + start, mask=(place_T < count)[:, None] & is_input_I[None, :], other=0.0)
        a_IR = tl.load(a_ptrs + start, mask=is_input_I[:, None] & (rank_R < rank)[None, :], other=0.0)
        sum_TR = dot(x_TI, a_IR, sum_TR, WIDEN)
    between_row_T = (split.to(tl.int64) * num_tokens + first + place_T) * NUM_PARTS + part
    out_ptrs = between_ptr + between_row_T[:, None] * MAX_RANK + rank_R[None, :]
    tl.store(out_ptrs, sum_TR, mask=(place_T < count)[:, None] & (rank_R < rank)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    between_ptr,  # [X, M, P, R], fp32
    b_ptr,  # [S, R, O]
    ranks_ptr,  # [S], int32
    starts_ptr,  # [P + 1], int32
    tokens_ptr,  # [M], int32
    items_ptr,  # [W, 3], int32
    out_ptr,  # [T, O], strides (out_stride_t, 1)
    num_tokens,
    out_stride_t,
    NUM_OUTPUTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out += between B, for the tokens of one item and BLOCK_O outputs of one part.

    Grid (W, outputs of the widest part / BLOCK_O, P). Bytes for each item: R * O * itemsize of B, and
    2 * T * O * itemsize of the output. FLOPs: 2 * T * R * O.
    """
    item_ptr = items_ptr + tl.program_id(0) * 3
    slot, first, count = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    part = tl.program_id(2)
    begin = tl.load(starts_ptr + part) + tl.program_id(1) * BLOCK_O
    end = tl.load(starts_ptr + part + 1)
    if (count == 0) | (begin >= end):
        return
    rank = tl.load(ranks_ptr + slot)
    if rank == 0:
        return
    place_T, rank_R = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    output_O = begin + tl.arange(0, BLOCK_O)
    mask_TR = (place_T < count)[:, None] & (rank_R < rank)[None, :]
    shrunk_TR = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        row_T = (split * num_tokens.to(tl.int64) + first + place_T) * NUM_PARTS + part
        ptrs = between_ptr + row_T[:, None] * MAX_RANK + rank_R[None, :]
        shrunk_TR += tl.load(ptrs, mask=mask_TR, other=0.0)
    b_row_R = slot.to(tl.int64) * MAX_RANK + rank_R
    b_ptrs = b_ptr + b_row_R[:, None] * NUM_OUTPUTS + output_O[None, :]
    b_RO = tl.load(b_ptrs, mask=(rank_R < rank)[:, None] & (output_O < end)[None, :], other=0.0)
    no_sum_TO = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    added_TO = dot(shrunk_TR.to(b_RO.dtype), b_RO, no_sum_TO, WIDEN)
    token_T = tl.load(tokens_ptr + first + place_T, mask=place_T < count, other=0).to(tl.int64)
    out_ptrs = out_ptr + token_T[:, None] * out_stride_t + output_O[None, :]
    mask_TO = (place_T < count)[:, None] & (output_O < end)[None, :]
    sum_TO = tl.load(out_ptrs, mask=mask_TO, other=0.0).to(tl.float32) + added_TO
    tl.store(out_ptrs, sum_TO.to(out_ptr.dtype.element_ty), mask=mask_TO)


def launch_add_lora(out_TO: torch.Tensor, x_TI: torch.Tensor, weights: LoraLinear, plan: LoraPlan) -> None:
    """Add the adapters' part to a layer's output. Raises ValueError for tensors that do not fit one another."""
    _, num_parts, max_rank, num_inputs = weights.a_SPRI.shape
    num_outputs, num_items = weights.b_SRO.shape[2], len(plan.items_W3)
    if x_TI.shape[1] != num_inputs or out_TO.shape != (len(x_TI), num_outputs):
        raise ValueError(
            f"adapters of {num_inputs} inputs and {num_outputs} outputs for {x_TI.shape} and {out_TO.shape}"
        )
    check_dense_rows(x_TI, out_TO)
    if not num_items:
        return
    num_tokens = len(plan.tokens_M)
    block_r = max(MIN_RANK, triton.next_power_of_2(max_rank))
    is_widened = x_TI.dtype == torch.bfloat16 and x_TI.device.type == "cpu"
    between_XMPR = torch.empty(
        (SPLITS, num_tokens, num_parts, max_rank), dtype=torch.float32, device=x_TI.device
    )
    shrink_kernel[(num_items, num_parts, SPLITS)](
        x_TI,
        weights.a_SPRI,
        weights.ranks_S,
        plan.tokens_M,
        plan.items_W3,
        between_XMPR,
        num_tokens,
        x_TI.stride(0),
        NUM_INPUTS=num_inputs,
        NUM_PARTS=num_parts,
        MAX_RANK=max_rank,
        BLOCK_T=ITEM_TOKENS,
        BLOCK_R=block_r,
        BLOCK_I=INPUT_TILE,
        SPLITS=SPLITS,
        WIDEN=is_widened,
    )
    expand_kernel[(num_items, triton.cdiv(max(weights.widths), OUTPUT_TILE), num_parts)](
        between_XMPR,
        weights.b_SRO,
        weights.ranks_S,
        weights.starts_P1,
        plan.tokens_M,
        plan.items_W3,
        out_TO,
        num_tokens,
        out_TO.stride(0),
        NUM_OUTPUTS=num_outputs,
        NUM_PARTS=num_parts,
        MAX_RANK=max_rank,
        BLOCK_T=ITEM_TOKENS,
        BLOCK_R=block_r,
        BLOCK_O=OUTPUT_TILE,
        SPLITS=SPLITS,
        WIDEN=is_widened,
    )
