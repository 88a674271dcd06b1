"""Turns the stored tensors of one linear layer into a weight of kernels/quantised.py.

Owns how each format packs its numbers. Names and shapes were checked before (stored.py). No number is rounded: the
weight means exactly what the checkpoint says.

Shapes: O outputs, I inputs, G groups of inputs. N numbers in 32 bits.
"""

from collections.abc import Mapping

import torch
from blockyard.kernels.quantised import (
    INT4_SYMMETRIC_ZERO,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantisedWeight,
    packed,
)
from blockyard.worker.model.quantisation.scheme import QuantScheme

Tensors = Mapping[str, torch.Tensor]

_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where the columns of eight lie in 32 bits."""
_INT8_OFFSET = 128


def as_weight(scheme: QuantScheme, tensors: Tensors, dtype: torch.dtype) -> QuantisedWeight:
    """Return the weight of a linear layer, from its tensors by the last part of their names.

    Raises ValueError for columns that are not `group_size` to a group.
    """
    match scheme.format:
        case "fp8" | "float-quantized":
            return _fp8(scheme, tensors, dtype)
        case "int-quantized":
            return _int8(tensors, dtype)
        case "pack-quantized":
            scale_OG = tensors["weight_scale"].float()
            numbers_OI = _unpacked(tensors["weight_packed"], scheme.bits).flatten(1)
            zero_OG = None
            if "weight_zero_point" in tensors:
                zero_OG = _unpacked(tensors["weight_zero_point"].t(), scheme.bits).flatten(1).t()
            g_idx_I = tensors.get("weight_g_idx")
        case "gptq":
            scale_OG = tensors["scales"].float().t()
            numbers_OI = _unpacked(tensors["qweight"].t(), scheme.bits).flatten(1)
            zeros = _with_offset(tensors["qzeros"], scheme)
            zero_OG = _unpacked(zeros, scheme.bits).flatten(1).t()
            g_idx_I = tensors["g_idx"]
        case "awq":
            scale_OG = tensors["scales"].float().t()
            numbers_OI = _by_shifts(tensors["qweight"], _AWQ_SHIFTS, 15).flatten(1).t()
            zero_OG = _by_shifts(tensors["qzeros"], _AWQ_SHIFTS, 15).flatten(1).t()
            g_idx_I = None
    order_I = None if g_idx_I is None else _order(g_idx_I, scheme, scale_OG.shape[1])
    if order_I is not None:
        numbers_OI = numbers_OI[:, order_I.long()]
    return _grouped(scheme, numbers_OI, scale_OG.contiguous(), zero_OG, order_I, dtype)


def _grouped(
    scheme: QuantScheme,
    numbers_OI: torch.Tensor,
    scale_OG: torch.Tensor,
    zero_OG: torch.Tensor | None,
    order_I: torch.Tensor | None,
    dtype: torch.dtype,
) -> QuantisedWeight:
    """Return a weight from numbers and zero points (uint8) without a sign."""
    size = numbers_OI.shape[1] // scale_OG.shape[1]
    if scheme.bits == 4:
        if zero_OG is None:
            zero_OG = torch.full(scale_OG.shape, INT4_SYMMETRIC_ZERO, dtype=torch.uint8)
        return Int4Weight(
            packed_OI=packed(numbers_OI),
            scale_OG=scale_OG,
            zero_OG=zero_OG.contiguous(),
            group_size=size,
            order_I=order_I,
            dtype=dtype,
        )
    signed_zero_OG = None if zero_OG is None else _signed(zero_OG)
    if signed_zero_OG is not None and not signed_zero_OG.any():
        signed_zero_OG = None
    return Int8Weight(
        weight_OI=_signed(numbers_OI),
        scale_OG=scale_OG,
        zero_OG=signed_zero_OG,
        group_size=size,
        order_I=order_I,
        dtype=dtype,
    )


def _int8(tensors: Tensors, dtype: torch.dtype) -> Int8Weight:
    weight_OI = tensors["weight"]
    outputs, inputs = weight_OI.shape
    scale_OG = _for_outputs(tensors["weight_scale"].float(), outputs)
    zero = tensors.get("weight_zero_point")
    zero_OG = None if zero is None or not zero.any() else _for_outputs(zero, outputs)
    return Int8Weight(
        weight_OI=weight_OI,
        scale_OG=scale_OG,
        zero_OG=zero_OG,
        group_size=inputs // scale_OG.shape[1],
        order_I=None,
        dtype=dtype,
    )


def _fp8(scheme: QuantScheme, tensors: Tensors, dtype: torch.dtype) -> Fp8Weight:
    scale = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"].float()
    weight_OI = tensors["weight"]
    if scheme.block_shape is None:
        scale = _for_outputs(scale, len(weight_OI))[:, 0].contiguous()
    return Fp8Weight(weight_OI=weight_OI, scale=scale, block_shape=scheme.block_shape, dtype=dtype)


def _for_outputs(value: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return [O, G] from that or from one number for the whole matrix."""
    return value.reshape(1, 1).repeat(outputs, 1) if value.numel() == 1 else value


def _unpacked(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [A, B, N] in uint8 from int32 [A, B], the lowest bits first."""
    return _by_shifts(numbers, tuple(range(0, 32, bits)), (1 << bits) - 1)


def _by_shifts(numbers: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Return [A, B, N] in uint8 from int32 [A, B]."""
    return torch.stack([(numbers >> shift & mask).to(torch.uint8) for shift in shifts], dim=-1)


def _with_offset(qzeros: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Return zero points as they are used. The first format of GPTQ subtracted a one of each from all 32 bits."""
    if not scheme.zero_offset:
        return qzeros
    ones = sum(1 << shift for shift in range(0, 32, scheme.bits))
    return qzeros + ones


def _signed(numbers: torch.Tensor) -> torch.Tensor:
    """Return uint8 less 128, in int8."""
    return (numbers ^ _INT8_OFFSET).view(torch.int8)


def _order(g_idx_I: torch.Tensor, scheme: QuantScheme, groups: int) -> torch.Tensor | None:
    """Return the columns sorted by their groups, or None where they lie so."""
    inputs = len(g_idx_I)
    plain_I = torch.arange(inputs, dtype=g_idx_I.dtype) // (inputs // groups)
    if torch.equal(g_idx_I, plain_I):
        return None
    order_I = torch.argsort(g_idx_I, stable=True)
    if not scheme.act_order or not torch.equal(g_idx_I[order_I], plain_I):
        raise ValueError(
            f"g_idx does not give each of {groups} groups {inputs // groups} of {inputs} columns"
        )
    return order_I.to(torch.int32)
