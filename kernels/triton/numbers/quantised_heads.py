"""Conversions of a quantised pool for Triton kernels: heads to numbers and scales, and numbers to operands.

kv_pool.py says what the numbers mean. The element type of the pool's pointer names them: int8, float8e4nv for e4m3 that
the device converts, or uint8 for the bits of e4m3. Integer arithmetic makes and reads those bits on devices without
such instructions, and under Triton's interpreter, which rounds e4m3 incorrectly. Both ways give equal bits.

Shapes: K kv heads, H part of a head, J keys of a tile, D head size.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

# As in kv_pool.py.
_SMALLEST_PEAK = tl.constexpr(1e-30)
# Adding and then subtracting it rounds an fp32 below 2^22 to the nearest whole number, ties to even.
_ROUNDS = tl.constexpr(12582912.0)
_E4M3_TO_FP32 = tl.constexpr(2.0**120)
# PTX for four numbers, from sm_89 on. fp16 holds every e4m3 exactly, and bf16 too.
_E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b16 pair<2>, half<4>;
    .reg .b32 halves<2>;
    .reg .f32 wide<4>;
    mov.b32 {pair0, pair1}, $2;
    cvt.rn.f16x2.e4m3x2 halves0, pair0;
    cvt.rn.f16x2.e4m3x2 halves1, pair1;
    mov.b32 {half0, half1}, halves0;
    mov.b32 {half2, half3}, halves1;
    cvt.f32.f16 wide0, half0;
    cvt.f32.f16 wide1, half1;
    cvt.f32.f16 wide2, half2;
    cvt.f32.f16 wide3, half3;
    cvt.rn.bf16x2.f32 $0, wide1, wide0;
    cvt.rn.bf16x2.f32 $1, wide3, wide2;
}""")
# PTX for four numbers, from sm_80 on. The low 7 bits b of a number are the bf16 128 + b, behind the exponent 0x43. The
# sign bit is worth -128, so -128 or -256 is added: 0xc300 or 0xc380. 0xea is (x & mask) | code.
_INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 pair<2>, low<2>, offset<2>, one;
    mov.b32 one, 0x3f803f80;
    prmt.b32 pair0, $2, 0, 0x4140;
    prmt.b32 pair1, $2, 0, 0x4342;
    lop3.b32 low0, pair0, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 low1, pair1, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 offset0, pair0, 0x00800080, 0xc300c300, 0xea;
    lop3.b32 offset1, pair1, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 $0, low0, one, offset0;
    fma.rn.bf16x2 $1, low1, one, offset1;
}""")


@triton.jit
def widened(numbers_JD, TYPE: tl.constexpr, EARLY: tl.constexpr):
    """Convert stored numbers to TYPE, exactly.

    To bf16, four numbers are converted at once. EARLY then keeps the conversion before shared memory. Otherwise the
    compiler may move it behind. Values, which a product reads by columns, would leave shared memory byte by byte.
    """
    if numbers_JD.dtype == tl.uint8:
        # e4m3's exponent and mantissa make an fp32 that is 2^120 times too small.
        bits_JD = numbers_JD.to(tl.int32)
        small_JD = (((bits_JD & 0x80) << 24) | ((bits_JD & 0x7F) << 20)).to(tl.float32, bitcast=True)
        wide_JD = tl.where((bits_JD & 0x7F) == 0x7F, float("nan"), small_JD * _E4M3_TO_FP32)
        return wide_JD.to(TYPE)
    elif tl.bfloat16 == TYPE:
        to_bf16: tl.constexpr = _INT8_TO_BF16 if numbers_JD.dtype == tl.int8 else _E4M3_TO_BF16
        return tl.inline_asm_elementwise(
            to_bf16, "=r,=r,r", [numbers_JD], dtype=tl.bfloat16, is_pure=not EARLY, pack=4
        )
    else:
        return numbers_JD.to(TYPE)


@triton.jit
def load_scales(key_ptrs_J, to_values, is_read_J, BLOCK_J: tl.constexpr, IS_LARGE: tl.constexpr):
    """Load the scales [J] of keys, and those of their values, which lie `to_values` behind; 0 if not `is_read_J`.

    One load gets both, and a program of eight warps (IS_LARGE) gets each twice. The compiler takes a load of fewer
    elements than threads for cheap. It would then repeat the load, with its addresses, in each thread that multiplies
    by the scale.
    """
    copies: tl.constexpr = 2 if IS_LARGE else 1
    ptrs_JC = key_ptrs_J[:, None] + (tl.arange(0, 2 * copies) // copies * to_values)[None, :]
    scales_JC = tl.load(ptrs_JC, mask=is_read_J[:, None], other=0.0)
    if IS_LARGE:
        scales_JC, _ = tl.split(tl.reshape(scales_JC, [BLOCK_J, 2, 2]))
    return tl.split(scales_JC)


@triton.jit
def finite_or_zero(x_KH):
    return tl.where(tl.abs(x_KH) < float("inf"), x_KH, 0.0)


@triton.jit
def peak_of(x_KH):
    """Return the largest magnitude [K], infinite if any number is not finite."""
    return tl.max(tl.where(tl.abs(x_KH) < float("inf"), tl.abs(x_KH), float("inf")), axis=1)


@triton.jit
def scale_of(peak_K, NUMBER: tl.constexpr):
    largest: tl.constexpr = 127.0 if tl.int8 == NUMBER else 448.0
    return tl.where(peak_K < float("inf"), peak_K / largest, float("nan"))


@triton.jit
def quantised(x_KH, peak_K, NUMBER: tl.constexpr):
    """Quantise heads, or parts of them, from fp32 to the pool's int8 or fp8. Values that are not finite become 0.

    `peak_K` is the largest absolute value of each head, which its scale comes from.
    """
    largest: tl.constexpr = 127.0 if tl.int8 == NUMBER else 448.0
    return rounded(finite_or_zero(x_KH) * (largest / tl.maximum(peak_K, _SMALLEST_PEAK))[:, None], NUMBER)


@triton.jit
def rounded(y_KH, NUMBER: tl.constexpr):
    """Round fp32 numbers that the pool's type can hold to the nearest of its numbers, ties to even."""
    if tl.int8 == NUMBER:
        return ((y_KH + _ROUNDS) - _ROUNDS).to(tl.int8)
    elif tl.float8e4nv == NUMBER:
        return y_KH.to(tl.float8e4nv)
    else:
        return _e4m3_bits(y_KH)


@triton.jit
def _e4m3_bits(y_KH):
    """Return the e4m3 bits of fp32 numbers of at most 448, rounded to the nearest, ties to even. From 2^-6 on, a number
    is 8 to 16 steps of 2^(exponent - 3), and below it 0 to 8 steps of 2^-9. The number of steps is added to the
    exponent's code."""
    bits_KH = y_KH.to(tl.int32, bitcast=True)
    exponent_KH = tl.maximum(((bits_KH >> 23) & 0xFF) - 127, -6)
    steps_each_KH = ((127 + 3 - exponent_KH) << 23).to(tl.float32, bitcast=True)
    steps_KH = (tl.abs(y_KH) * steps_each_KH + _ROUNDS) - _ROUNDS
    magnitude_KH = ((exponent_KH + 6) << 3) + steps_KH.to(tl.int32)
    return (magnitude_KH | ((bits_KH >> 24) & 0x80)).to(tl.uint8)
