"""Triton kernels of linears whose weight has 4 or 8 bits: the product, the sum of its parts, and plain weights.

The product is computed transposed, weight @ x^T. Hopper's matrix instructions read their left operand from registers,
where the weight's numbers are unpacked. They read the right one, the inputs, from shared memory as it was loaded. Few
tokens then fill narrow tiles. weights.py says how a weight lies in memory, and choice.py which tiles a launch gets.

Shapes: T tokens, I inputs, O outputs. U units, which are the columns of one turn of the loop, H half a unit. G groups
of units that share a scale, A scales of a group, S parts of a split product.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from blockyard.kernels.triton.numbers.quantised_heads import widened

# Tiles of tokens that are computed side by side, so that a weight's tile is still in the cache for the next one.
_TILES_SIDE_BY_SIDE = tl.constexpr(8)
# PTX for eight numbers of 4 bits in four bytes, from sm_80 on. A number n below 16 behind the exponent 0x43 is the bf16
# 128 + n; $5 and $6 are pairs of -128 - zero. Behind 0x64 it is the fp16 1024 + n. 0xea is (x & mask) | code.
_INT4 = """{
    .reg .b32 pair<2>, high<2>, number<4>, one;
    mov.b32 one, ONE;
    prmt.b32 pair0, $4, 0, 0x4140;
    prmt.b32 pair1, $4, 0, 0x4342;
    shr.u32 high0, pair0, 4;
    shr.u32 high1, pair1, 4;
    lop3.b32 number0, pair0, 0x000f000f, BASE, 0xea;
    lop3.b32 number1, pair1, 0x000f000f, BASE, 0xea;
    lop3.b32 number2, high0, 0x000f000f, BASE, 0xea;
    lop3.b32 number3, high1, 0x000f000f, BASE, 0xea;
    fma.rn.TYPE $0, number0, one, $5;
    fma.rn.TYPE $1, number1, one, $6;
    fma.rn.TYPE $2, number2, one, $5;
    fma.rn.TYPE $3, number3, one, $6;
}"""
_INT4_TO_BF16 = tl.constexpr(
    _INT4.replace("ONE", "0x3f803f80").replace("BASE", "0x43004300").replace("TYPE", "bf16x2")
)
_INT4_TO_FP16 = tl.constexpr(
    _INT4.replace("ONE", "0x3c003c00").replace("BASE", "0x64006400").replace("TYPE", "f16x2")
)

_EIGHT_OF_FOUR = tl.constexpr("=r,=r,=r,=r,r,r,r")


@triton.jit
def unpacked(packed_OH, zero_O, TYPE: tl.constexpr):
    """Return both halves of a unit [O, H] as number - zero, exactly."""
    if tl.float32 == TYPE:
        zero_O1 = zero_O.to(TYPE)[:, None]
        return (packed_OH & 15).to(TYPE) - zero_O1, (packed_OH >> 4).to(TYPE) - zero_O1
    elif tl.bfloat16 == TYPE:
        shift_O = (-128.0 - zero_O.to(tl.float32)).to(tl.bfloat16)
        operands = [packed_OH, tl.broadcast_to(shift_O[:, None], packed_OH.shape)]
        return tl.inline_asm_elementwise(
            _INT4_TO_BF16, _EIGHT_OF_FOUR, operands, dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        shift_O = (-1024.0 - zero_O.to(tl.float32)).to(tl.float16)
        operands = [packed_OH, tl.broadcast_to(shift_O[:, None], packed_OH.shape)]
        return tl.inline_asm_elementwise(
            _INT4_TO_FP16, _EIGHT_OF_FOUR, operands, dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )


@triton.jit
def scales_of_group(
    scale_ptr, zero_ptr, group, num_scales, num_outputs, output_O, ROWS: tl.constexpr, ZERO: tl.constexpr
):
    """Load the scales [O] of a group, and its zero points or the one of all groups."""
    scale_O = tl.load(scale_ptr + group * num_scales + output_O // ROWS)
    if ZERO is None:
        zero_O = tl.load(zero_ptr + group * num_outputs + output_O)
    else:
        zero_O = tl.full(output_O.shape, ZERO, tl.int32)
    return scale_O, zero_O


@triton.jit
def _inputs(x_ptrs_TK, column_K, row_T, num_rows, num_inputs, MASKED: tl.constexpr):
    """Load inputs [T, K]; 0 from `num_rows` on, and MASKED from `num_inputs` on."""
    mask_TK = (row_T < num_rows)[:, None]
    if MASKED:
        mask_TK = mask_TK & (column_K < num_inputs)[None, :]
    return tl.load(x_ptrs_TK, mask=mask_TK, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "num_splits", "units_a_split"])
def quantised_linear_kernel(
    x_ptr,  # [T, I], strides (x_stride_t, 1); with X_SCALES its numbers of 8 bits
    x_scale_ptr,  # [1 or U, T], fp32, only with X_SCALES
    numbers_ptr,  # 4 bits: [U, O, H] bytes; 8 bits: [O, I], int8 or e4m3 (also as bits)
    scale_ptr,  # [G, A], fp32, one for ROWS_A_SCALE outputs each
    zero_ptr,  # [G, O], only if ZERO is None
    bias_ptr,  # [O], only with HAS_BIAS
    out_ptr,  # [T, O], contiguous, written if num_splits is 1
    partial_ptr,  # [S, T, O], fp32, contiguous, written otherwise
    num_rows,
    num_outputs,
    num_inputs,
    num_units,
    num_scales,
    num_splits,
    units_a_split,
    x_stride_t,
    unit_stride,  # of numbers_ptr
    output_stride,
    IS_INT4: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_A_GROUP: tl.constexpr,  # 0: all units are one group, and the sum is scaled once
    ROWS_A_SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    X_SCALES: tl.constexpr,  # "none", "token", or "unit": of each token and unit
    HAS_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    TYPE: tl.constexpr,  # of the operands
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """out = x @ w^T + bias, with w = (number - zero) * scale, and x = number * x_scale with X_SCALES.

    Operands are exact. Products are summed over a unit in fp32 or, of whole numbers, in int32, and then scaled.

    Grid (ceil(O / BLOCK_O) * ceil(T / BLOCK_T), S): a program computes a tile over some units. Bytes: the weight's, and
    T * (I + O) * itemsize. FLOPs: 2 * T * I * O.
    """
    num_wide = tl.cdiv(num_outputs, BLOCK_O)
    tile_t, tile_o = tl.swizzle2d(
        tl.program_id(0) // num_wide,
        tl.program_id(0) % num_wide,
        tl.cdiv(num_rows, BLOCK_T),
        num_wide,
        _TILES_SIDE_BY_SIDE,
    )
    output_O = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output_O = output_O < num_outputs
    kept_O = tl.where(is_output_O, output_O, 0)
    row_T = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    first = split * units_a_split
    last = tl.minimum(first + units_a_split, num_units)
    WIDTH: tl.constexpr = UNIT // 2 if IS_INT4 else UNIT
    step_W = tl.arange(0, WIDTH)
    numbers_ptrs_OW = numbers_ptr + kept_O.to(tl.int64)[:, None] * output_stride + step_W[None, :]
    x_ptrs_TW = x_ptr + row_T.to(tl.int64)[:, None] * x_stride_t + step_W[None, :]
    to_next_unit = unit_stride.to(tl.int64)
    SUM: tl.constexpr = tl.int32 if tl.int8 == TYPE else tl.float32
    IS_LATE: tl.constexpr = UNITS_A_GROUP == 0
    zero_sum_OT = tl.zeros([BLOCK_O, BLOCK_T], SUM)
    acc_OT = zero_sum_OT if IS_LATE else tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    if IS_LATE:
        scale_O, zero_O = scales_of_group(
            scale_ptr, zero_ptr, 0, num_scales, num_outputs, kept_O, ROWS_A_SCALE, ZERO
        )
    for unit in range(first, last):
        column_W = unit * UNIT + step_W
        part_OT = acc_OT if IS_LATE else zero_sum_OT
        if not IS_LATE:
            scale_O, zero_O = scales_of_group(
                scale_ptr,
                zero_ptr,
                unit // UNITS_A_GROUP,
                num_scales,
                num_outputs,
                kept_O,
                ROWS_A_SCALE,
                ZERO,
            )
        numbers_OW = tl.load(
            numbers_ptrs_OW + unit * to_next_unit,
            mask=(column_W < num_inputs)[None, :] if MASKED and not IS_INT4 else None,
            other=0.0 if MASKED and not IS_INT4 else None,
        )
        x_TW = _inputs(x_ptrs_TW + unit * UNIT, column_W, row_T, num_rows, num_inputs, MASKED)
        if IS_INT4:
            high_x_TW = _inputs(
                x_ptrs_TW + unit * UNIT + WIDTH, column_W + WIDTH, row_T, num_rows, num_inputs, MASKED
            )
            low_OW, high_OW = unpacked(numbers_OW, zero_O, TYPE)
            part_OT = tl.dot(low_OW, tl.trans(x_TW.to(TYPE)), part_OT, input_precision="ieee")
            part_OT = tl.dot(high_OW, tl.trans(high_x_TW.to(TYPE)), part_OT, input_precision="ieee")
        elif X_SCALES == "none":
            wide_OW = widened(numbers_OW, TYPE, False)
            if ZERO != 0:
                wide_OW -= zero_O.to(TYPE)[:, None]
            part_OT = tl.dot(wide_OW, tl.trans(x_TW.to(TYPE)), part_OT, input_precision="ieee")
        elif x_ptr.dtype.element_ty == TYPE:
            part_OT = tl.dot(numbers_OW, tl.trans(x_TW), part_OT, max_num_imprecise_acc=UNIT, out_dtype=SUM)
        else:
            wide_OW, wide_x_TW = widened(numbers_OW, TYPE, False), widened(x_TW, TYPE, False)
            part_OT = tl.dot(wide_OW, tl.trans(wide_x_TW), part_OT, input_precision="ieee")
        if IS_LATE:
            acc_OT = part_OT
        elif X_SCALES == "unit":
            x_scale_T = tl.load(x_scale_ptr + unit * num_rows + row_T, mask=row_T < num_rows, other=0.0)
            acc_OT += part_OT.to(tl.float32) * (scale_O[:, None] * x_scale_T[None, :])
        else:
            acc_OT += part_OT.to(tl.float32) * scale_O[:, None]
    if IS_LATE:
        acc_OT = acc_OT.to(tl.float32) * scale_O[:, None]
    if X_SCALES == "token":
        acc_OT *= tl.load(x_scale_ptr + row_T, mask=row_T < num_rows, other=0.0)[None, :]
    place_OT = row_T.to(tl.int64)[None, :] * num_outputs + output_O[:, None]
    mask_OT = is_output_O[:, None] & (row_T < num_rows)[None, :]
    if num_splits == 1:
        if HAS_BIAS:
            acc_OT += tl.load(bias_ptr + kept_O).to(tl.float32)[:, None]
        tl.store(out_ptr + place_OT, acc_OT.to(out_ptr.dtype.element_ty), mask=mask_OT)
    else:
        first_place = split.to(tl.int64) * num_rows * num_outputs
        tl.store(partial_ptr + first_place + place_OT, acc_OT, mask=mask_OT)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def sum_parts_kernel(
    partial_ptr,  # [S, T, O], fp32, contiguous
    bias_ptr,  # [O], only with HAS_BIAS
    out_ptr,  # [T, O], contiguous
    num_rows,
    num_outputs,
    num_splits,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """out = sum of the parts in their order, + bias.

    Grid (T, ceil(O / TILE)): a program takes one tile of one token. Bytes: S * T * O * 4 + T * O * itemsize.
    """
    output = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = output < num_outputs
    place = tl.program_id(0).to(tl.int64) * num_outputs + output
    to_next_part = num_outputs.to(tl.int64) * num_rows
    total = tl.zeros([TILE], tl.float32)
    for split in range(num_splits):
        total += tl.load(partial_ptr + split * to_next_part + place, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_output", "end_output"])
def dequantise_kernel(
    numbers_ptr,  # 4 bits: [U, O, H] bytes; 8 bits: [O, I], int8 or e4m3 (also as bits)
    scale_ptr,  # [G, A], fp32, one for ROWS_A_SCALE outputs each
    zero_ptr,  # [G, O], only if ZERO is None
    plain_ptr,  # [end_output - first_output, I], contiguous
    first_output,
    end_output,
    num_outputs,
    num_inputs,
    num_scales,
    unit_stride,  # of numbers_ptr
    output_stride,
    IS_INT4: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_A_GROUP: tl.constexpr,  # 0: all units are one group
    ROWS_A_SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    MASKED: tl.constexpr,
    TYPE: tl.constexpr,  # in which a number minus its zero point is exact
    BLOCK_O: tl.constexpr,
):
    """plain = (number - zero) * scale, for the outputs from `first_output` to `end_output`.

    Grid (ceil(outputs / BLOCK_O), U): a program takes one unit. Bytes: the numbers, and outputs * I * itemsize.
    """
    output_O = first_output + tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output_O = output_O < end_output
    kept_O = tl.where(is_output_O, output_O, first_output)
    unit = tl.program_id(1)
    WIDTH: tl.constexpr = UNIT // 2 if IS_INT4 else UNIT
    step_W = tl.arange(0, WIDTH)
    column_W = unit * UNIT + step_W
    group = 0 if UNITS_A_GROUP == 0 else unit // UNITS_A_GROUP
    scale_O, zero_O = scales_of_group(
        scale_ptr, zero_ptr, group, num_scales, num_outputs, kept_O, ROWS_A_SCALE, ZERO
    )
    numbers_OW = tl.load(
        numbers_ptr
        + unit.to(tl.int64) * unit_stride
        + kept_O.to(tl.int64)[:, None] * output_stride
        + step_W[None, :],
        mask=(column_W < num_inputs)[None, :] if MASKED and not IS_INT4 else None,
        other=0.0 if MASKED and not IS_INT4 else None,
    )
    place_OW = (kept_O - first_output).to(tl.int64)[:, None] * num_inputs + column_W[None, :]
    mask_OW = is_output_O[:, None] & (column_W < num_inputs)[None, :]
    if IS_INT4:
        low_OW, high_OW = unpacked(numbers_OW, zero_O, TYPE)
        _store_scaled(plain_ptr, place_OW, low_OW, scale_O, mask_OW)
        high_mask_OW = is_output_O[:, None] & (column_W + WIDTH < num_inputs)[None, :]
        _store_scaled(plain_ptr, place_OW + WIDTH, high_OW, scale_O, high_mask_OW)
    else:
        wide_OW = widened(numbers_OW, TYPE, False)
        if ZERO != 0:
            wide_OW -= zero_O.to(TYPE)[:, None]
        _store_scaled(plain_ptr, place_OW, wide_OW, scale_O, mask_OW)


@triton.jit
def _store_scaled(plain_ptr, place_OW, number_OW, scale_O, mask_OW):
    plain_OW = number_OW.to(tl.float32) * scale_O[:, None]
    tl.store(plain_ptr + place_OW, plain_OW.to(plain_ptr.dtype.element_ty), mask=mask_OW)
