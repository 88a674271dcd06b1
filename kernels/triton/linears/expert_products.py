"""Products of experts whose weights have 4 or 8 bits, in Triton: the kernel and its launch.

Tiles of pairs come from experts.py, and each has one expert. The product is that of product.py, for many weights
instead of one: weight @ x^T, summed over a unit in fp32 and then scaled. Numbers are widened as there.

Shapes: E experts, P pairs of token and expert, O outputs, I inputs. U units, H half a unit, G groups of units that
share a scale, A scales of a group. S rows of all tiles, T rows of a tile.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from blockyard.kernels.triton.linears.choice import has_wide_products, linear_tiles
from blockyard.kernels.triton.linears.launches import TYPES, as_loaded, form_of, multiplied_type, strides_of
from blockyard.kernels.triton.linears.product import scales_of_group, unpacked
from blockyard.kernels.triton.linears.weights import TiledExperts
from blockyard.kernels.triton.numbers.quantised_heads import widened


@triton.jit
def _inputs(
    x_ptrs_T1, order_ptr, column_W, is_pair_T1, num_inputs, ORDERED: tl.constexpr, MASKED: tl.constexpr
):
    """Load inputs [T, W] in these columns of the weight; 0 where there is no pair, and MASKED from `num_inputs` on."""
    mask_TW = is_pair_T1
    if MASKED:
        mask_TW = mask_TW & (column_W < num_inputs)[None, :]
    if ORDERED:
        column_W = tl.load(order_ptr + column_W, mask=column_W < num_inputs, other=0)
    return tl.load(x_ptrs_T1 + column_W[None, :], mask=mask_TW, other=0.0)


@triton.jit(do_not_specialize=["num_pairs"])
def quantised_experts_kernel(
    x_ptr,  # [P / PAIRS_A_ROW, I], strides (x_stride, 1)
    numbers_ptr,  # [E, ...], of each expert as in quantised_linear_kernel
    scale_ptr,  # [E, G, A], fp32, one for ROWS_A_SCALE outputs each
    zero_ptr,  # [E, G, O], only if ZERO is None
    order_ptr,  # [E, I], int32, only with ORDERED: the input of each column
    out_ptr,  # [P, O], contiguous
    pairs_ptr,  # [S], int32
    tiles_ptr,  # [S / T], int32
    num_pairs,
    num_outputs,
    num_inputs,
    num_units,
    num_groups,
    num_scales,
    x_stride,
    expert_stride,  # of numbers_ptr
    unit_stride,
    output_stride,
    PAIRS_A_ROW: tl.constexpr,
    ORDERED: tl.constexpr,
    IS_INT4: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_A_GROUP: tl.constexpr,  # 0: all units are one group, and the sum is scaled once
    ROWS_A_SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    MASKED: tl.constexpr,
    TYPE: tl.constexpr,  # of the operands
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """out = x @ w[expert]^T for every pair, with w = (number - zero) * scale.

    Grid (ceil(O / BLOCK_O), S / T): a program has a tile of one expert's pairs. Bytes: those of an expert's weight for
    each tile, and P * (I + O) * itemsize. FLOPs: 2 * P * I * O.
    """
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair_T = tl.load(pairs_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T))
    is_pair_T1 = (pair_T < num_pairs)[:, None]
    row_T = tl.where(pair_T < num_pairs, pair_T // PAIRS_A_ROW, 0).to(tl.int64)
    output_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output_O = output_O < num_outputs
    kept_O = tl.where(is_output_O, output_O, 0)
    scale_ptr += expert * num_groups * num_scales
    if ZERO is None:
        zero_ptr += expert * num_groups * num_outputs
    if ORDERED:
        order_ptr += expert * num_inputs
    WIDTH: tl.constexpr = UNIT // 2 if IS_INT4 else UNIT
    step_W = tl.arange(0, WIDTH)
    numbers_ptr += expert * expert_stride
    numbers_ptrs_OW = numbers_ptr + kept_O.to(tl.int64)[:, None] * output_stride + step_W[None, :]
    x_ptrs_T1 = x_ptr + row_T[:, None] * x_stride
    to_next_unit = unit_stride.to(tl.int64)
    IS_LATE: tl.constexpr = UNITS_A_GROUP == 0
    zero_sum_OT = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    acc_OT = zero_sum_OT
    if IS_LATE:
        scale_O, zero_O = scales_of_group(
            scale_ptr, zero_ptr, 0, num_scales, num_outputs, kept_O, ROWS_A_SCALE, ZERO
        )
    for unit in range(num_units):
        column_W = unit * UNIT + step_W
        part_OT = acc_OT if IS_LATE else zero_sum_OT
        if not IS_LATE:
            group = unit // UNITS_A_GROUP
            scale_O, zero_O = scales_of_group(
                scale_ptr, zero_ptr, group, num_scales, num_outputs, kept_O, ROWS_A_SCALE, ZERO
            )
        numbers_OW = tl.load(
            numbers_ptrs_OW + unit * to_next_unit,
            mask=(column_W < num_inputs)[None, :] if MASKED and not IS_INT4 else None,
            other=0.0 if MASKED and not IS_INT4 else None,
        )
        x_TW = _inputs(x_ptrs_T1, order_ptr, column_W, is_pair_T1, num_inputs, ORDERED, MASKED)
        if IS_INT4:
            high_x_TW = _inputs(
                x_ptrs_T1, order_ptr, column_W + WIDTH, is_pair_T1, num_inputs, ORDERED, MASKED
            )
            low_OW, high_OW = unpacked(numbers_OW, zero_O, TYPE)
            part_OT = tl.dot(low_OW, tl.trans(x_TW.to(TYPE)), part_OT, input_precision="ieee")
            part_OT = tl.dot(high_OW, tl.trans(high_x_TW.to(TYPE)), part_OT, input_precision="ieee")
        else:
            wide_OW = widened(numbers_OW, TYPE, False)
            if ZERO != 0:
                wide_OW -= zero_O.to(TYPE)[:, None]
            part_OT = tl.dot(wide_OW, tl.trans(x_TW.to(TYPE)), part_OT, input_precision="ieee")
        if IS_LATE:
            acc_OT = part_OT
        else:
            acc_OT += part_OT * scale_O[:, None]
    if IS_LATE:
        acc_OT = acc_OT * scale_O[:, None]
    place_OT = pair_T.to(tl.int64)[None, :] * num_outputs + output_O[:, None]
    mask_OT = is_output_O[:, None] & (pair_T < num_pairs)[None, :]
    tl.store(out_ptr + place_OT, acc_OT.to(out_ptr.dtype.element_ty), mask=mask_OT)


def launch_quantised_experts(
    x: torch.Tensor,
    weight: TiledExperts,
    out: torch.Tensor,
    pairs_S: torch.Tensor,
    expert_of_tile: torch.Tensor,
    pairs_a_row: int,
) -> None:
    """Set out [P, O] to the product of each pair's row of `x` with its expert's weight. Never synchronises."""
    first, rows = weight.first, len(pairs_S) // len(expert_of_tile)
    tiles = linear_tiles(
        rows,
        x.dtype,
        widens_groups=first.widens_groups,
        has_wide_products=has_wide_products(x.device),
    )
    num_outputs, num_inputs = first.shape
    num_groups, num_scales = first.scale_GA.shape
    quantised_experts_kernel[(triton.cdiv(num_outputs, tiles.outputs), len(expert_of_tile))](
        x,
        as_loaded(weight.numbers),
        weight.scale_EGA,
        weight.scale_EGA if weight.zero_EGO is None else weight.zero_EGO,
        pairs_S if weight.order_EI is None else weight.order_EI,
        out,
        pairs_S,
        expert_of_tile,
        len(out),
        num_outputs,
        num_inputs,
        first.num_units,
        num_groups,
        num_scales,
        x.stride(0),
        weight.numbers.stride(0),
        *strides_of(first),
        PAIRS_A_ROW=pairs_a_row,
        ORDERED=weight.order_EI is not None,
        TYPE=TYPES[multiplied_type(x)],
        BLOCK_O=tiles.outputs,
        BLOCK_T=rows,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **form_of(first),
    )
