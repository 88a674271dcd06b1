"""Weights of linear layers in 4 or 8 bits: one layout in memory for each kind of number, for every checkpoint format.

Owns the layouts and their meaning as plain numbers (`dequantised`), which every kernel is tested against. Does not read
checkpoints (worker/model/quantisation/), and does not multiply (the backends).

A group is a run of `group_size` columns that share a scale and a zero point. Every group is whole: the group size
divides the inputs.

Shapes: O outputs, I inputs, G = I / group size. A, B numbers of blocks of outputs and of inputs.
"""

from dataclasses import dataclass

import torch

INT4_SYMMETRIC_ZERO = 8
"""The stored number of 4 bits that stands for 0 where a checkpoint has no zero points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """Numbers of 4 bits without a sign: w = (number - zero) * scale, in groups of columns."""

    packed_OI: torch.Tensor
    """uint8 [O, I / 2]. The low half of a byte is the even column."""
    scale_OG: torch.Tensor
    """float32 [O, G]."""
    zero_OG: torch.Tensor
    """uint8 [O, G], from 0 to 15."""
    group_size: int
    order_I: torch.Tensor | None
    """int32 [I], or None. Column c of the weight belongs to input `order_I[c]`, so the inputs' columns are gathered by
    it before the product (act order of GPTQ)."""
    dtype: torch.dtype
    """The data type of inputs and outputs, and of the weight as plain numbers."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return (O, I)."""
        return self.packed_OI.shape[0], self.packed_OI.shape[1] * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """Numbers of 8 bits with a sign: w = (number - zero) * scale, in groups of columns.

    A scale for each output is one group of all inputs (G = 1).
    """

    weight_OI: torch.Tensor
    """int8 [O, I]."""
    scale_OG: torch.Tensor
    """float32 [O, G]."""
    zero_OG: torch.Tensor | None
    """int8 [O, G], or None where all zero points are 0."""
    group_size: int
    order_I: torch.Tensor | None
    """int32 [I], or None, as in `Int4Weight`."""
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Return (O, I)."""
        return self.weight_OI.shape[0], self.weight_OI.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """Numbers in float8_e4m3fn: w = number * scale. A scale belongs to an output, or to a block of both sides."""

    weight_OI: torch.Tensor
    """float8_e4m3fn [O, I]."""
    scale: torch.Tensor
    """float32. [O] where `block_shape` is None, otherwise [A, B]."""
    block_shape: tuple[int, int] | None
    """Outputs and inputs of a block. The last blocks of both sides may be cut off."""
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Return (O, I)."""
        return self.weight_OI.shape[0], self.weight_OI.shape[1]


class BackendWeight:
    """A quantised weight in a layout that the `linear` of one backend alone can read."""


QuantisedWeight = Int4Weight | Int8Weight | Fp8Weight
LinearWeight = torch.Tensor | QuantisedWeight | BackendWeight


def packed(numbers_OI: torch.Tensor) -> torch.Tensor:
    """Return numbers of 4 bits as `Int4Weight.packed_OI`, from uint8 [O, I]."""
    return numbers_OI[:, ::2] | numbers_OI[:, 1::2] << 4


def plain(weight: LinearWeight) -> torch.Tensor:
    """Return a weight that no backend has packed as plain numbers [O, I], whether or not it is quantised."""
    assert not isinstance(weight, BackendWeight)
    return weight if isinstance(weight, torch.Tensor) else dequantised(weight)


def dequantised(weight: QuantisedWeight) -> torch.Tensor:
    """Return the weight as plain numbers [O, I], computed in float32 and rounded to its data type.

    Columns are in the order of the inputs, so no gathering precedes the product.
    """
    match weight:
        case Int4Weight():
            numbers_OI = torch.stack((weight.packed_OI & 15, weight.packed_OI >> 4), dim=-1).flatten(1)
            plain_OI = _scaled(numbers_OI.float(), weight.scale_OG, weight.zero_OG)
            return _in_order(plain_OI.to(weight.dtype), weight.order_I)
        case Int8Weight():
            plain_OI = _scaled(weight.weight_OI.float(), weight.scale_OG, weight.zero_OG)
            return _in_order(plain_OI.to(weight.dtype), weight.order_I)
        case Fp8Weight():
            scaled_OI: torch.Tensor = weight.weight_OI.float() * _fp8_scales(weight)
            return scaled_OI.to(weight.dtype)


def _scaled(numbers_OI: torch.Tensor, scale_OG: torch.Tensor, zero_OG: torch.Tensor | None) -> torch.Tensor:
    numbers_OGS: torch.Tensor = numbers_OI.unflatten(1, (scale_OG.shape[1], -1))
    if zero_OG is not None:
        numbers_OGS = numbers_OGS - zero_OG.float()[:, :, None]
    return (numbers_OGS * scale_OG.float()[:, :, None]).flatten(1)


def _in_order(plain_OI: torch.Tensor, order_I: torch.Tensor | None) -> torch.Tensor:
    if order_I is None:
        return plain_OI
    ordered_OI = torch.empty_like(plain_OI)
    ordered_OI[:, order_I.long()] = plain_OI
    return ordered_OI


def _fp8_scales(weight: Fp8Weight) -> torch.Tensor:
    """Return the scales in a shape that multiplies [O, I]."""
    if weight.block_shape is None:
        return weight.scale[:, None]
    (outputs, inputs), (rows, columns) = weight.shape, weight.block_shape
    tall = weight.scale.repeat_interleave(rows, 0)[:outputs]
    return tall.repeat_interleave(columns, 1)[:, :inputs]
