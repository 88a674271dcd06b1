"""Quantised linear layers while a checkpoint is read: collected, cut to a rank's part, and fused.

A layer's tensors may come in any order, from several files. A matrix is built once all layers in it are whole, so at
most few are in memory twice. Each rank reads a whole layer and keeps its part.

Shapes: O outputs, I inputs. A matrix of several layers has their outputs one after the other.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from blockyard.kernels.quantised import Fp8Weight, Int4Weight, Int8Weight, QuantisedWeight
from blockyard.worker.model.quantisation.formats import as_weight
from blockyard.worker.model.quantisation.scheme import QuantScheme
from blockyard.worker.model.quantisation.stored import stored_modules

MATRICES = {
    "qkv_QH": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out_HA": ("self_attn.o_proj",),
    "gate_up_2IH": ("mlp.gate_proj", "mlp.up_proj"),
    "down_HI": ("mlp.down_proj",),
}
"""The linear layers in each matrix of `LayerWeights`."""
EXPERT_MATRICES = {"gate_up_E2IH": ("gate_proj", "up_proj"), "down_EHI": ("down_proj",)}
"""The linear layers of an expert in each stack of `ExpertWeights`."""

Put = Callable[[QuantisedWeight], None]
Place = Callable[[str], tuple[slice, ...] | None]
Order = Callable[[str, int], torch.Tensor | None]


class QuantisedLayers:
    """Builds the quantised matrices of a model from tensors that come one by one."""

    def __init__(
        self,
        scheme: QuantScheme,
        modules: Mapping[str, tuple[int, int]],
        stored: Collection[str],
        *,
        place: Place,
        order: Order,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`modules` are the quantised layers with their sizes, `stored` the names of all stored tensors.

        `place` says where a rank's part lies in a weight [O, I], by its name. `order` gives the order in which a
        layer's outputs are used, by its name and their number, or None.
        """
        self._scheme = scheme
        self._sizes = modules
        self._parts_of = stored_modules(modules, scheme)
        self._place = place
        self._order = order
        self._dtype = dtype
        self._device = device
        self._matrix_of: dict[str, tuple[tuple[str, ...], Put]] = {}
        self._missing: dict[str, set[str]] = defaultdict(set)
        for name in stored:
            module, _, kind = name.rpartition(".")
            self._missing[module].add(kind)
        self._tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        self._weights: dict[str, QuantisedWeight] = {}

    def expect(self, modules: tuple[str, ...], put: Put) -> None:
        """Expect the layers of one matrix, and call `put` with it."""
        for module in modules:
            self._matrix_of[module] = modules, put

    def takes(self, name: str) -> bool:
        """Return whether a tensor belongs to a quantised layer. Its bias does not."""
        module, _, kind = name.rpartition(".")
        return module in self._parts_of and kind != "bias"

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor. Raises ValueError for one that contradicts the scheme."""
        module, _, kind = name.rpartition(".")
        self._tensors[module][kind] = tensor
        if self._missing[module] - self._tensors[module].keys() - {"bias"}:
            return
        try:
            weight = as_weight(self._scheme, self._tensors.pop(module), self._dtype)
        except ValueError as error:
            raise ValueError(f"{module}: {error}") from error
        first, parts = 0, self._parts_of[module]
        for part in parts:
            outputs = self._sizes[part][0]
            own = weight if len(parts) == 1 else cut(weight, slice(first, first + outputs))
            place = self._place(f"{part}.weight")
            assert place is not None
            self._weights[part] = cut(_in_order(own, self._order(part, outputs)), *place)
            first += outputs
        modules, put = self._matrix_of[parts[0]]
        if all(other in self._weights for other in modules):
            matrix = concatenated([self._weights.pop(other) for other in modules], modules)
            put(_moved(matrix, self._device))


def _in_order(weight: QuantisedWeight, order_O: torch.Tensor | None) -> QuantisedWeight:
    """Return the outputs in another order, which keeps those of a block together."""
    if order_O is None:
        return weight
    match weight:
        case Int4Weight():
            return replace(
                weight,
                packed_OI=weight.packed_OI[order_O],
                scale_OG=weight.scale_OG[order_O],
                zero_OG=weight.zero_OG[order_O],
            )
        case Int8Weight():
            return replace(
                weight,
                weight_OI=weight.weight_OI[order_O],
                scale_OG=weight.scale_OG[order_O],
                zero_OG=None if weight.zero_OG is None else weight.zero_OG[order_O],
            )
        case Fp8Weight():
            numbers_OI = weight.weight_OI.view(torch.uint8)[order_O].view(weight.weight_OI.dtype)
            scale = weight.scale[order_O] if weight.block_shape is None else weight.scale
            return replace(weight, weight_OI=numbers_OI, scale=scale)


def cut(weight: QuantisedWeight, rows: slice, columns: slice = slice(None)) -> QuantisedWeight:
    """Return some outputs and inputs of a weight. Cuts between groups and blocks alone (`check_division`)."""
    outputs, inputs = weight.shape
    match weight:
        case Int4Weight():
            first, last, groups, size = _columns(columns, inputs, weight)
            return replace(
                weight,
                packed_OI=weight.packed_OI[rows, first // 2 : last // 2].contiguous(),
                scale_OG=weight.scale_OG[rows, groups].contiguous(),
                zero_OG=weight.zero_OG[rows, groups].contiguous(),
                group_size=size,
            )
        case Int8Weight():
            first, last, groups, size = _columns(columns, inputs, weight)
            return replace(
                weight,
                weight_OI=weight.weight_OI[rows, first:last].contiguous(),
                scale_OG=weight.scale_OG[rows, groups].contiguous(),
                zero_OG=None if weight.zero_OG is None else weight.zero_OG[rows, groups].contiguous(),
                group_size=size,
            )
        case Fp8Weight():
            scale = weight.scale[rows]
            if weight.block_shape is not None:
                (start, stop, _), (high, wide) = rows.indices(outputs), weight.block_shape
                first, last, _ = columns.indices(inputs)
                scale = weight.scale[start // high : -(-stop // high), first // wide : -(-last // wide)]
            weight_OI = weight.weight_OI[rows, columns].contiguous()
            return replace(weight, weight_OI=weight_OI, scale=scale.contiguous())


def _columns(columns: slice, inputs: int, weight: Int4Weight | Int8Weight) -> tuple[int, int, slice, int]:
    """Return the first column and the one behind the last, their groups, and the size of a group."""
    first, last, _ = columns.indices(inputs)
    if last - first == inputs:
        return first, last, slice(None), weight.group_size
    assert weight.order_I is None
    if weight.group_size == inputs:
        return first, last, slice(None), last - first
    return first, last, slice(first // weight.group_size, last // weight.group_size), weight.group_size


def concatenated(weights: Sequence[QuantisedWeight], names: Sequence[str]) -> QuantisedWeight:
    """Return one weight with the outputs of all. Raises ValueError for layers with different orders of columns."""
    first = weights[0]
    if len(weights) == 1:
        return first
    match first:
        case Int4Weight():
            int4 = [weight for weight in weights if isinstance(weight, Int4Weight)]
            _check_order([weight.order_I for weight in int4], names)
            return replace(
                first,
                packed_OI=torch.cat([weight.packed_OI for weight in int4]),
                scale_OG=torch.cat([weight.scale_OG for weight in int4]),
                zero_OG=torch.cat([weight.zero_OG for weight in int4]),
            )
        case Int8Weight():
            int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
            _check_order([weight.order_I for weight in int8], names)
            zero_OG = None
            if any(weight.zero_OG is not None for weight in int8):
                zero_OG = torch.cat([_zeros_of(weight) for weight in int8])
            return replace(
                first,
                weight_OI=torch.cat([weight.weight_OI for weight in int8]),
                scale_OG=torch.cat([weight.scale_OG for weight in int8]),
                zero_OG=zero_OG,
            )
        case Fp8Weight():
            fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
            return replace(
                first,
                weight_OI=torch.cat([weight.weight_OI for weight in fp8]),
                scale=torch.cat([weight.scale for weight in fp8]),
            )


def _check_order(orders: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
    first = orders[0]
    for other in orders[1:]:
        if (first is None) != (other is None) or not (
            first is None or other is None or torch.equal(first, other)
        ):
            raise ValueError(f"{', '.join(names)} order their columns differently, and are one matrix here")


def _zeros_of(weight: Int8Weight) -> torch.Tensor:
    if weight.zero_OG is not None:
        return weight.zero_OG
    return torch.zeros(weight.scale_OG.shape, dtype=torch.int8)


def _moved(weight: QuantisedWeight, device: torch.device) -> QuantisedWeight:
    match weight:
        case Int4Weight():
            return replace(
                weight,
                packed_OI=weight.packed_OI.to(device),
                scale_OG=weight.scale_OG.to(device),
                zero_OG=weight.zero_OG.to(device),
                order_I=None if weight.order_I is None else weight.order_I.to(device),
            )
        case Int8Weight():
            return replace(
                weight,
                weight_OI=weight.weight_OI.to(device),
                scale_OG=weight.scale_OG.to(device),
                zero_OG=None if weight.zero_OG is None else weight.zero_OG.to(device),
                order_I=None if weight.order_I is None else weight.order_I.to(device),
            )
        case Fp8Weight():
            return replace(weight, weight_OI=weight.weight_OI.to(device), scale=weight.scale.to(device))
