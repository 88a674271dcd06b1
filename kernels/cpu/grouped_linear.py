"""Linear layers with weights of 4 or 8 bits in groups of inputs on a CPU: their layout, and the call into
native/grouped.cpp.

A weight means what its checkpoint says: its numbers and scales are not rounded again. Inputs are rounded to 16 bits, or
to 8 for linears in int8, a chunk of at most 128 by itself. So a token's result does not depend on the other tokens of
the step. Must never import triton.

Shapes: T tokens, I input size, O output size, U = O / 16 groups of outputs. C chunks, D inputs of a chunk. G groups of
inputs. E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blockyard.kernels.cpu.checks import need
from blockyard.kernels.cpu.library import CpuLibrary, GroupedLinear
from blockyard.kernels.cpu.native_linear import LANES, run_linear
from blockyard.kernels.quantised import BackendWeight, Int4Weight, Int8Weight
from blockyard.kernels.torch.huge_pages import advise_empty

LINE_BYTES = 64
MOST_DEPTH = 128
_INT8_OFFSET = 128
_GROUPS_AT_ONCE = 64
"""Groups that are laid out together. They need some memory beside the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight(BackendWeight):
    """A weight as grouped.cpp reads it."""

    memory: torch.Tensor
    """uint8 [U, bytes]: for 16 outputs their numbers, scales [C, 16] (float32) and zeros [C, 16] (uint8)."""
    bits: int
    depth: int
    num_inputs: int
    order_I: torch.Tensor | None
    input_bits: int
    """Bits to which inputs are rounded: 16 or 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedStack(Sequence[GroupedWeight]):
    """A matrix of each expert as grouped.cpp reads it."""

    memory: torch.Tensor
    """uint8 [E, U, bytes], of each expert as in `GroupedWeight`."""
    bits: int
    depth: int
    num_inputs: int
    order_EI: torch.Tensor | None
    """int32, or None where no expert has an order."""

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, expert: Any) -> Any:
        """Return the weight of one expert, a view."""
        return GroupedWeight(
            memory=self.memory[expert],
            bits=self.bits,
            depth=self.depth,
            num_inputs=self.num_inputs,
            order_I=None if self.order_EI is None else self.order_EI[expert],
            input_bits=16,
        )


def can_group(library: CpuLibrary, weight: Int4Weight | Int8Weight) -> bool:
    """Return whether the kernel takes such a weight."""
    return (
        library.has_int8
        and weight.scale_OG.is_cpu
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.shape[0] % LANES == 0
        and _depth(weight) > 0
    )


def group(weight: Int4Weight | Int8Weight, *, input_bits: int = 16) -> GroupedWeight:
    """Return a copy in the kernel's layout, for inputs of 16 or 8 bits. Requires `can_group`."""
    (outputs, inputs), depth = weight.shape, _depth(weight)
    bits = 4 if isinstance(weight, Int4Weight) else 8
    chunks, repeats = inputs // depth, weight.group_size // depth
    number_bytes, scale_bytes = inputs * LANES * bits // 8, chunks * LINE_BYTES
    num_bytes = -(-(number_bytes + scale_bytes + chunks * LANES) // LINE_BYTES) * LINE_BYTES
    memory = torch.empty(outputs // LANES, num_bytes, dtype=torch.uint8)
    advise_empty(memory)
    zero_OG = _zeros(weight)

    def by_chunks(value_OG: torch.Tensor) -> torch.Tensor:
        chunks_U16C: torch.Tensor = value_OG.repeat_interleave(repeats, dim=1).unflatten(0, (-1, LANES))
        return chunks_U16C.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)

    for first in range(0, len(memory), _GROUPS_AT_ONCE):
        rows = memory[first : first + _GROUPS_AT_ONCE]
        some = slice(first * LANES, (first + len(rows)) * LANES)
        rows[:, :number_bytes] = _lines(weight, some)
        rows[:, number_bytes : number_bytes + scale_bytes] = by_chunks(weight.scale_OG[some].float())
        rest = rows[:, number_bytes + scale_bytes :]
        rest[:, : chunks * LANES] = by_chunks(zero_OG[some])
        rest[:, chunks * LANES :] = 0
    return GroupedWeight(
        memory=memory,
        bits=bits,
        depth=depth,
        num_inputs=inputs,
        order_I=weight.order_I,
        input_bits=input_bits,
    )


def group_stack(weights: Sequence[Int4Weight | Int8Weight]) -> GroupedStack:
    """Return the weights of all experts in one tensor. Requires `can_group` of each, and one shape and group size."""
    first = group(weights[0])
    memory = torch.empty(len(weights), *first.memory.shape, dtype=torch.uint8)
    advise_empty(memory)
    for expert, weight in enumerate(weights):
        memory[expert] = group(weight).memory if expert else first.memory
    orders = [weight.order_I for weight in weights]
    plain_I = torch.arange(first.num_inputs, dtype=torch.int32)
    return GroupedStack(
        memory=memory,
        bits=first.bits,
        depth=first.depth,
        num_inputs=first.num_inputs,
        order_EI=None
        if all(order is None for order in orders)
        else torch.stack([plain_I if order is None else order for order in orders]),
    )


def grouped_linear(
    library: CpuLibrary, x_TI: torch.Tensor, weight: GroupedWeight, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """Return x @ weight^T + bias, for a weight from `group`."""
    need(weight.num_inputs == x_TI.shape[1], "a weight of {} inputs for {}", weight.num_inputs, x_TI.shape[1])
    order_I = weight.order_I
    return run_linear(
        library.grouped_linear,
        x_TI,
        weight.memory,
        bias_O,
        weight.memory.shape[0] * LANES,
        lambda linear: GroupedLinear(
            linear=linear,
            order=None if order_I is None else order_I.data_ptr(),
            bits=weight.bits,
            depth=weight.depth,
            input_bits=weight.input_bits,
        ),
    )


def _depth(weight: Int4Weight | Int8Weight) -> int:
    """Return the most inputs that make whole lines and divide a group, or 0."""
    together = 8 if isinstance(weight, Int4Weight) else 4
    size = weight.group_size
    return next((depth for depth in range(MOST_DEPTH, 0, -together) if size % depth == 0), 0)


def _zeros(weight: Int4Weight | Int8Weight) -> torch.Tensor:
    """Return the zero points of numbers without a sign, in uint8 [O, G]."""
    if isinstance(weight, Int4Weight):
        return weight.zero_OG
    if weight.zero_OG is None:
        return torch.full(weight.scale_OG.shape, _INT8_OFFSET, dtype=torch.uint8)
    return weight.zero_OG.view(torch.uint8) ^ _INT8_OFFSET


def _lines(weight: Int4Weight | Int8Weight, some: slice) -> torch.Tensor:
    """Return the numbers of groups of 16 outputs, in uint8 [U, bytes], with four inputs of each output side by side."""
    if isinstance(weight, Int8Weight):
        lines: torch.Tensor = weight.weight_OI[some].view(torch.uint8).unflatten(1, (-1, 4)) ^ _INT8_OFFSET
    else:
        # Two bytes have the first four of eight inputs, two the others.
        first, last = weight.packed_OI[some].unflatten(1, (-1, 2, 2)).unbind(2)
        lines = torch.stack((first & 15 | last << 4, first >> 4 | last & 0xF0), dim=-1).flatten(2)
    groups: torch.Tensor = lines.unflatten(0, (-1, LANES))
    return groups.transpose(1, 2).flatten(1)
