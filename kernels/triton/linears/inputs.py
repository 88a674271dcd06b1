"""Quantises the inputs of a linear layer to 8 bits: the kernel and its launch.

Each token, or each unit of a token's columns, has a scale of its own. So a token's result does not depend on the other
tokens of the step.

Shapes: T tokens, I inputs, U units of a token, or 1. R units of a program, C columns of a unit.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from blockyard.kernels.triton.numbers.devices import converts_e4m3
from blockyard.kernels.triton.numbers.quantised_heads import peak_of, quantised, scale_of

TILE = 2048
"""Columns of a program whose units are shorter."""


@triton.jit(do_not_specialize=["num_rows"])
def quantise_inputs_kernel(
    x_ptr,  # [T, I], strides (x_stride_t, 1)
    numbers_ptr,  # [T, I], contiguous, int8 or e4m3 (also as bits)
    scale_ptr,  # [U, T], fp32, contiguous
    num_rows,
    num_inputs,
    num_units,
    x_stride_t,
    UNIT: tl.constexpr,
    UNIT_POW2: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """number = x / scale, rounded, with scale = largest magnitude of a unit / largest number.

    Grid (T, ceil(U / BLOCK_R)): a program quantises BLOCK_R units of a token. A unit that is not finite gets the scale
    NaN. Bytes: T * I * (itemsize + 1). FLOPs: 4 * T * I.
    """
    token = tl.program_id(0).to(tl.int64)
    unit_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    step_C = tl.arange(0, UNIT_POW2)
    column_RC = unit_R[:, None] * UNIT + step_C[None, :]
    mask_RC = (column_RC < num_inputs) & (step_C < UNIT)[None, :]
    x_RC = tl.load(x_ptr + token * x_stride_t + column_RC, mask=mask_RC, other=0.0).to(tl.float32)
    peak_R = peak_of(x_RC)
    NUMBER: tl.constexpr = numbers_ptr.dtype.element_ty
    tl.store(numbers_ptr + token * num_inputs + column_RC, quantised(x_RC, peak_R, NUMBER), mask=mask_RC)
    tl.store(scale_ptr + unit_R * num_rows + token, scale_of(peak_R, NUMBER), mask=unit_R < num_units)


def launch_quantise_inputs(
    x_TI: torch.Tensor, dtype: torch.dtype, unit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers [T, I] of `dtype`, as bits where the device does not convert e4m3, and their scales [U, T].

    A `unit` of all inputs gives each token one scale.
    """
    num_rows, num_inputs = x_TI.shape
    assert x_TI.stride(1) == 1, x_TI.stride()
    if dtype == torch.float8_e4m3fn and not converts_e4m3(x_TI.device):
        dtype = torch.uint8
    num_units = triton.cdiv(num_inputs, unit)
    numbers_TI = x_TI.new_empty((num_rows, num_inputs), dtype=dtype)
    scale_UT = x_TI.new_empty((num_units, num_rows), dtype=torch.float32)
    unit_pow2 = triton.next_power_of_2(unit)
    units_a_program = max(1, min(TILE // unit_pow2, triton.next_power_of_2(num_units)))
    quantise_inputs_kernel[(num_rows, triton.cdiv(num_units, units_a_program))](
        x_TI,
        numbers_TI,
        scale_UT,
        num_rows,
        num_inputs,
        num_units,
        x_TI.stride(0),
        UNIT=unit,
        UNIT_POW2=unit_pow2,
        BLOCK_R=units_a_program,
        num_warps=warps_of(unit_pow2),
    )
    return numbers_TI, scale_UT


def warps_of(unit_pow2: int) -> int:
    """Return the warps of a program, so that a thread holds at most 32 columns where there are that many warps."""
    return min(16, max(4, unit_pow2 // 1024))
