"""Launches of products with quantised weights. Never synchronises.

Shapes: T tokens, I inputs, O outputs, U units, or 1. S parts of a split product.
"""

# Triton ships no types.
# mypy: disable-error-code="import-untyped"

from typing import Any

import torch
import triton
import triton.language as tl
from blockyard.kernels.triton.linears.choice import (
    DEQUANTISE_FROM_TOKENS,
    DEQUANTISE_WARPS,
    DEQUANTISED_BYTES,
    DEQUANTISED_OUTPUTS,
    has_wide_products,
    linear_tiles,
    multiprocessors_of,
    units_a_split,
)
from blockyard.kernels.triton.linears.inputs import launch_quantise_inputs
from blockyard.kernels.triton.linears.product import (
    dequantise_kernel,
    quantised_linear_kernel,
    sum_parts_kernel,
)
from blockyard.kernels.triton.linears.weights import TiledWeight
from blockyard.kernels.triton.numbers.devices import converts_e4m3

SUM_TILE = 512
TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
}


def launch_quantised_linear(
    x_TI: torch.Tensor, weight: TiledWeight, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """Return x @ weight^T + bias [T, O]."""
    num_rows, num_inputs = x_TI.shape
    num_outputs = weight.shape[0]
    if num_inputs != weight.shape[1]:
        raise ValueError(f"a weight for {weight.shape[1]} inputs got {num_inputs}")
    out_TO = x_TI.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out_TO
    if weight.order_I is not None:
        x_TI = x_TI.index_select(1, weight.order_I)
    assert x_TI.stride(1) == 1, x_TI.stride()
    if num_rows >= DEQUANTISE_FROM_TOKENS and not _rounds_inputs(weight):
        return _multiplied_plain(x_TI, weight, bias_O, out_TO)
    tiles = linear_tiles(
        num_rows,
        x_TI.dtype,
        widens_groups=weight.widens_groups,
        has_wide_products=has_wide_products(x_TI.device),
    )
    num_tiles = triton.cdiv(num_outputs, tiles.outputs) * triton.cdiv(num_rows, tiles.tokens)
    units = units_a_split(num_tiles, weight.num_units, multiprocessors_of(x_TI.device))
    num_splits = triton.cdiv(weight.num_units, units)
    partial = out_TO
    if num_splits > 1:
        partial = x_TI.new_empty((num_splits, num_rows, num_outputs), dtype=torch.float32)
    multiplied, x_scale, form = _operands(x_TI, weight)
    quantised_linear_kernel[(num_tiles, num_splits)](
        multiplied,
        x_scale,
        as_loaded(weight.numbers),
        weight.scale_GA,
        weight.scale_GA if weight.zero_GO is None else weight.zero_GO,
        x_TI if bias_O is None else bias_O,
        out_TO,
        partial,
        num_rows,
        num_outputs,
        num_inputs,
        weight.num_units,
        weight.scale_GA.shape[1],
        num_splits,
        units,
        multiplied.stride(0),
        *strides_of(weight),
        HAS_BIAS=bias_O is not None,
        BLOCK_O=tiles.outputs,
        BLOCK_T=tiles.tokens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **form,
        **form_of(weight),
    )
    if num_splits > 1:
        _sum_parts(partial, bias_O, out_TO)
    return out_TO


def form_of(weight: TiledWeight) -> dict[str, Any]:
    """Return the constants of the product that follow from the weight alone."""
    return {
        "IS_INT4": weight.is_int4,
        "UNIT": weight.unit,
        "UNITS_A_GROUP": weight.units_a_group,
        "ROWS_A_SCALE": weight.rows_a_scale,
        "ZERO": weight.common_zero if weight.zero_GO is None else None,
        "MASKED": weight.shape[1] % weight.unit != 0,
    }


def _operands(x_TI: torch.Tensor, weight: TiledWeight) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return inputs and scales as the kernel reads them, and the constants that say so."""
    wide = multiplied_type(x_TI)
    if not _rounds_inputs(weight):
        return x_TI, weight.scale_GA, {"X_SCALES": "none", "TYPE": TYPES[wide]}
    is_by_token = weight.units_a_group == 0
    numbers_TI, scale_UT = launch_quantise_inputs(
        x_TI, weight.numbers.dtype, x_TI.shape[1] if is_by_token else weight.unit
    )
    # The interpreter reads e4m3 as bits, and both sides are widened.
    operand = wide if numbers_TI.dtype == torch.uint8 else numbers_TI.dtype
    return numbers_TI, scale_UT, {"X_SCALES": "token" if is_by_token else "unit", "TYPE": TYPES[operand]}


def multiplied_type(x: torch.Tensor) -> torch.dtype:
    """Return the type in which widened numbers are multiplied. The interpreter would multiply bf16 as bits."""
    return torch.float32 if x.device.type == "cpu" else x.dtype


def _rounds_inputs(weight: TiledWeight) -> bool:
    return weight.quantises_inputs and _multiplies(weight.numbers)


def _multiplied_plain(
    x_TI: torch.Tensor, weight: TiledWeight, bias_O: torch.Tensor | None, out_TO: torch.Tensor
) -> torch.Tensor:
    """Write the weight out in the type of the inputs, some outputs after the others, and fill the result with the
    product."""
    num_outputs, num_inputs = weight.shape
    outputs = min(
        max(DEQUANTISED_OUTPUTS, DEQUANTISED_BYTES // (num_inputs * x_TI.element_size())), num_outputs
    )
    plain_PI = x_TI.new_empty(outputs, num_inputs)
    for first in range(0, num_outputs, outputs):
        end = min(first + outputs, num_outputs)
        dequantise_kernel[(triton.cdiv(end - first, DEQUANTISED_OUTPUTS), weight.num_units)](
            as_loaded(weight.numbers),
            weight.scale_GA,
            weight.scale_GA if weight.zero_GO is None else weight.zero_GO,
            plain_PI,
            first,
            end,
            num_outputs,
            num_inputs,
            weight.scale_GA.shape[1],
            *strides_of(weight),
            TYPE=TYPES[multiplied_type(x_TI)],
            BLOCK_O=DEQUANTISED_OUTPUTS,
            num_warps=DEQUANTISE_WARPS,
            **form_of(weight),
        )
        weight_IP, out_TP = plain_PI[: end - first].T, out_TO[:, first:end]
        if bias_O is None:
            torch.mm(x_TI, weight_IP, out=out_TP)
        else:
            torch.addmm(bias_O[first:end], x_TI, weight_IP, out=out_TP)
    return out_TO


def _multiplies(numbers: torch.Tensor) -> bool:
    """Return whether the device multiplies such numbers: e4m3 with e4m3 from compute capability 8.9 on. The interpreter
    does by widening them."""
    return numbers.dtype == torch.int8 or numbers.device.type == "cpu" or converts_e4m3(numbers.device)


def as_loaded(numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers, as bits where the device does not convert e4m3."""
    as_bits = numbers.dtype == torch.float8_e4m3fn and not converts_e4m3(numbers.device)
    return numbers.view(torch.uint8) if as_bits else numbers


def strides_of(weight: TiledWeight) -> tuple[int, int]:
    """Return the distances of units and of outputs in the numbers."""
    if weight.is_int4:
        return weight.numbers.stride(0), weight.numbers.stride(1)
    return weight.unit, weight.numbers.stride(0)


def _sum_parts(partial_STO: torch.Tensor, bias_O: torch.Tensor | None, out_TO: torch.Tensor) -> None:
    num_splits, num_rows, num_outputs = partial_STO.shape
    sum_parts_kernel[(num_rows, triton.cdiv(num_outputs, SUM_TILE))](
        partial_STO,
        out_TO if bias_O is None else bias_O,
        out_TO,
        num_rows,
        num_outputs,
        num_splits,
        HAS_BIAS=bias_O is not None,
        TILE=SUM_TILE,
    )
