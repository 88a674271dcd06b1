"""Conversions of a quantised pool for Triton kernels: heads to numbers and scales, and numbers to operands.

kv_pool.py says what the numbers mean. The element type of the pool's pointer names them: int8, or uint8 for the bits of
e4m3. Arithmetic makes and reads that format, so one source serves every GPU. Triton converts e4m3 on some GPUs only,
and its interpreter rounds it incorrectly.

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


@triton.jit
def widened(numbers_JD, TYPE: tl.constexpr):
    """Convert stored numbers to TYPE, exactly. e4m3's exponent and mantissa make an fp32 that is 2^120 times
    too small."""
    if numbers_JD.dtype == tl.uint8:
        bits_JD = numbers_JD.to(tl.int32)
        small_JD = (((bits_JD & 0x80) << 24) | ((bits_JD & 0x7F) << 20)).to(tl.float32, bitcast=True)
        return (small_JD * _E4M3_TO_FP32).to(TYPE)
    else:
        return numbers_JD.to(TYPE)


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
    y_KH = finite_or_zero(x_KH) * (largest / tl.maximum(peak_K, _SMALLEST_PEAK))[:, None]
    if tl.int8 == NUMBER:
        return ((y_KH + _ROUNDS) - _ROUNDS).to(tl.int8)
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
