"""Layout of a quantised weight that product.py reads.

Columns are divided into units, which a program multiplies one after the other. All columns of a unit share a scale.
Scales lie side by side for outputs. Numbers of 8 bits stay where they are. Of 4 bits, the bytes of a unit lie together.
A byte holds a number of the unit's first half, and in its high bits one of the second half. Both halves are multiplied
apart, so no numbers change places in registers.

Shapes: O outputs, I inputs, U units, H half a unit. G groups of units that share a scale, A scales of a group. E
experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from blockyard.kernels.quantised import (
    INT4_SYMMETRIC_ZERO,
    BackendWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantisedWeight,
)

LARGEST_UNIT, SMALLEST_UNIT = 128, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledWeight(BackendWeight):
    """A quantised weight as product.py reads it."""

    numbers: torch.Tensor
    """Numbers of 4 bits as uint8 [U, O, H], of 8 bits as int8 or float8_e4m3fn [O, I]."""
    scale_GA: torch.Tensor
    """float32."""
    zero_GO: torch.Tensor | None
    """uint8 or int8; None where all are `common_zero`."""
    common_zero: int
    order_I: torch.Tensor | None
    unit: int
    units_a_group: int
    """0 where all units are one group."""
    rows_a_scale: int
    shape: tuple[int, int]
    dtype: torch.dtype
    quantises_inputs: bool
    """Whether inputs are rounded to 8 bits too."""

    @property
    def is_int4(self) -> bool:
        return self.numbers.dtype == torch.uint8

    @property
    def widens_groups(self) -> bool:
        """Return whether numbers of 8 bits are widened and then scaled by groups."""
        return not (self.is_int4 or self.quantises_inputs or self.units_a_group == 0)

    @property
    def num_units(self) -> int:
        return -(-self.shape[1] // self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledExperts(Sequence[TiledWeight]):
    """A matrix of each expert as expert_products.py reads it: the tensors of `TiledWeight` in stacks [E, ...]."""

    first: TiledWeight
    """The first expert's weight, a view. The others have the same form."""
    numbers: torch.Tensor
    scale_EGA: torch.Tensor
    zero_EGO: torch.Tensor | None
    order_EI: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, expert: Any) -> Any:
        """Return the weight of one expert, a view."""
        return replace(
            self.first,
            numbers=self.numbers[expert],
            scale_GA=self.scale_EGA[expert],
            zero_GO=None if self.zero_EGO is None else self.zero_EGO[expert],
            order_I=None if self.order_EI is None else self.order_EI[expert],
        )


def can_tile(weight: QuantisedWeight) -> bool:
    """Return whether groups are large enough: a product of a unit needs 16 columns of each half."""
    return _unit_of(_columns_a_scale(weight), weight.shape) >= SMALLEST_UNIT


def tiled(weight: QuantisedWeight, *, quantises_inputs: bool = False) -> TiledWeight:
    """Return the weight in the layout of product.py. Requires `can_tile`.

    `quantises_inputs` rounds the inputs of products to 8 bits where the weight has 8 bits, no zero points, and one
    scale for an output or a block.
    """
    unit = _unit_of(_columns_a_scale(weight), weight.shape)
    match weight:
        case Int4Weight():
            zero_GO, common_zero = _zeros(weight.zero_OG, INT4_SYMMETRIC_ZERO)
            numbers = _by_halves(weight, unit)
        case Int8Weight():
            zero_GO, common_zero = (None, 0) if weight.zero_OG is None else _zeros(weight.zero_OG, 0)
            numbers = weight.weight_OI.contiguous()
        case Fp8Weight():
            return _tiled_fp8(weight, unit, quantises_inputs)
    is_whole = weight.group_size == weight.shape[1]
    takes_int8 = isinstance(weight, Int8Weight) and is_whole and zero_GO is None
    return TiledWeight(
        numbers=numbers,
        scale_GA=weight.scale_OG.T.contiguous(),
        zero_GO=zero_GO,
        common_zero=common_zero,
        order_I=weight.order_I,
        unit=unit,
        units_a_group=0 if is_whole else weight.group_size // unit,
        rows_a_scale=1,
        shape=weight.shape,
        dtype=weight.dtype,
        quantises_inputs=quantises_inputs and takes_int8,
    )


def tiled_experts(weights: list[QuantisedWeight]) -> TiledExperts:
    """Return a matrix of each expert, of one kind and shape, in one stack. Requires `can_tile` of each.

    Empties the list, so that its weights are freed one by one.
    """
    count = len(weights)
    parts: list[TiledWeight] = []
    numbers: torch.Tensor | None = None
    for expert in range(count):
        own = tiled(weights.pop(0))
        if numbers is None:
            numbers = torch.empty(
                (count, *own.numbers.shape), dtype=own.numbers.dtype, device=own.numbers.device
            )
        numbers[expert] = own.numbers
        parts.append(replace(own, numbers=numbers[expert]))
    assert numbers is not None
    first = parts[0]
    common = {part.common_zero if part.zero_GO is None else None for part in parts}
    zero_EGO = None if len(common) == 1 and None not in common else torch.stack(list(map(_all_zeros, parts)))
    order_EI = None
    if any(part.order_I is not None for part in parts):
        plain_I = torch.arange(first.shape[1], dtype=torch.int32, device=numbers.device)
        order_EI = torch.stack([plain_I if part.order_I is None else part.order_I for part in parts])
    stack = TiledExperts(
        first=first,
        numbers=numbers,
        scale_EGA=torch.stack([part.scale_GA for part in parts]),
        zero_EGO=zero_EGO,
        order_EI=order_EI,
    )
    return replace(stack, first=stack[0])


def _all_zeros(weight: TiledWeight) -> torch.Tensor:
    """Return the zero points [G, O] of a weight, whether or not they are all alike."""
    if weight.zero_GO is not None:
        return weight.zero_GO
    dtype = torch.uint8 if weight.is_int4 else torch.int8
    shape = (weight.scale_GA.shape[0], weight.shape[0])
    return torch.full(shape, weight.common_zero, dtype=dtype, device=weight.numbers.device)


def _tiled_fp8(weight: Fp8Weight, unit: int, quantises_inputs: bool) -> TiledWeight:
    rows, columns = weight.block_shape or (1, weight.shape[1])
    return TiledWeight(
        numbers=weight.weight_OI.contiguous(),
        scale_GA=weight.scale[None] if weight.block_shape is None else weight.scale.T.contiguous(),
        zero_GO=None,
        common_zero=0,
        order_I=None,
        unit=unit,
        units_a_group=0 if columns >= weight.shape[1] else columns // unit,
        rows_a_scale=rows,
        shape=weight.shape,
        dtype=weight.dtype,
        quantises_inputs=quantises_inputs,
    )


def _columns_a_scale(weight: QuantisedWeight) -> int:
    if isinstance(weight, Fp8Weight):
        return weight.shape[1] if weight.block_shape is None else weight.block_shape[1]
    return weight.group_size


def _unit_of(columns_a_scale: int, shape: tuple[int, int]) -> int:
    """Return the columns of a unit: the largest power of two up to 128 that divides the columns of a scale.

    Where one scale has all columns, the last unit may be cut off.
    """
    if columns_a_scale >= shape[1]:
        return LARGEST_UNIT
    return min(columns_a_scale & -columns_a_scale, LARGEST_UNIT)


def _zeros(zero_OG: torch.Tensor, usual: int) -> tuple[torch.Tensor | None, int]:
    """Return the zero points [G, O], or None and the usual one if no other occurs."""
    if bool((zero_OG == usual).all()):
        return None, usual
    return zero_OG.T.contiguous(), 0


def _by_halves(weight: Int4Weight, unit: int) -> torch.Tensor:
    """Return numbers of 4 bits by halves of units [U, O, H]. Columns behind the last one are 0."""
    outputs, inputs = weight.shape
    num_units = -(-inputs // unit)
    numbers_OI = torch.stack((weight.packed_OI & 15, weight.packed_OI >> 4), dim=-1).flatten(1)
    padded_OI = torch.nn.functional.pad(numbers_OI, (0, num_units * unit - inputs))
    halves_OU2H = padded_OI.view(outputs, num_units, 2, unit // 2)
    bytes_OUH = halves_OU2H[:, :, 0] | halves_OU2H[:, :, 1] << 4
    return bytes_OUH.transpose(0, 1).contiguous()
