"""Quantised linear layers while a checkpoint is read: collected, cut to a rank's part, and fused.

A layer's tensors may come in any order, from several files. A matrix is built once all layers in it are whole, so at
most few are in memory twice. Each rank reads a whole layer and keeps its part.

Shapes: O outputs, I inputs. A matrix of several layers has their outputs one after the other.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from blockyard.kernels.quantised import Fp8Weight, Int4Weight, Int8Weight, QuantisedWeight
from blockyard.worker.model.quantisation.formats import as_weight
from blockyard.worker.model.quantisation.scheme import QuantScheme

MATRICES = {
    "qkv_QH": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out_HA": ("self_attn.o_proj",),
    "gate_up_2IH": ("mlp.gate_proj", "mlp.up_proj"),
    "down_HI": ("mlp.down_proj",),
}
"""The linear layers in each matrix of `LayerWeights`."""

Put = Callable[[QuantisedWeight], None]
Place = Callable[[str], tuple[slice, ...] | None]


class QuantisedLayers:
    """Builds the quantised matrices of a model from tensors that come one by one."""

    def __init__(self, scheme: QuantScheme, place: Place, dtype: torch.dtype, device: torch.device) -> None:
        """`place` says where a rank's part lies in a weight [O, I] of the checkpoint, by its name there."""
        self._scheme = scheme
        self._place = place
        self._dtype = dtype
        self._device = device
        self._matrix_of: dict[str, tuple[tuple[str, ...], Put]] = {}
        self._missing: dict[str, set[str]] = {}
        self._tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        self._weights: dict[str, QuantisedWeight] = {}

    def expect(self, modules: tuple[str, ...], stored: Collection[str], put: Put) -> None:
        """Expect the layers of one matrix, and call `put` with it. `stored` are the names of all stored tensors."""
        for module in modules:
            self._matrix_of[module] = modules, put
            self._missing[module] = set()
        for name in stored:
            module, _, kind = name.rpartition(".")
            if module in modules:
                self._missing[module].add(kind)

    def takes(self, name: str) -> bool:
        """Return whether a tensor belongs to a quantised layer. Its bias does not."""
        module, _, kind = name.rpartition(".")
        return module in self._matrix_of and kind != "bias"

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
        place = self._place(f"{module}.weight")
        assert place is not None
        self._weights[module] = cut(weight, *place)
        modules, put = self._matrix_of[module]
        if all(other in self._weights for other in modules):
            matrix = concatenated([self._weights.pop(other) for other in modules], modules)
            put(_moved(matrix, self._device))


def cut(weight: QuantisedWeight, rows: slice, columns: slice = slice(None)) -> QuantisedWeight:
    """Return some outputs and inputs of a weight. Cuts between groups and blocks alone (`check_division`)."""
    outputs, inputs = weight.shape
    first, last, _ = columns.indices(inputs)
    match weight:
        case Int4Weight() | Int8Weight():
            is_whole = last - first == inputs
            assert is_whole or weight.order_I is None
            groups = weight.scale_OG.shape[1]
            some = (
                slice(None) if groups == 1 else slice(first // weight.group_size, last // weight.group_size)
            )
            zero_OG = None if weight.zero_OG is None else weight.zero_OG[rows, some].contiguous()
            size = last - first if groups == 1 else weight.group_size
            changes: dict[str, Any] = {
                "scale_OG": weight.scale_OG[rows, some].contiguous(),
                "group_size": size,
            }
            if isinstance(weight, Int4Weight):
                packed_OI = weight.packed_OI[rows, first // 2 : last // 2].contiguous()
                return replace(weight, packed_OI=packed_OI, zero_OG=zero_OG, **changes)
            return replace(
                weight, weight_OI=weight.weight_OI[rows, first:last].contiguous(), zero_OG=zero_OG, **changes
            )
        case Fp8Weight():
            start, stop, _ = rows.indices(outputs)
            if weight.block_shape is None:
                scale = weight.scale[rows]
            else:
                high, wide = weight.block_shape
                scale = weight.scale[start // high : -(-stop // high), first // wide : -(-last // wide)]
            weight_OI = weight.weight_OI[rows, first:last].contiguous()
            return replace(weight, weight_OI=weight_OI, scale=scale.contiguous())


def concatenated(weights: Sequence[QuantisedWeight], names: Sequence[str]) -> QuantisedWeight:
    """Return one weight with the outputs of all. Raises ValueError for layers with different orders of columns."""
    first = weights[0]
    if len(weights) == 1:
        return first
    tensors: dict[str, torch.Tensor | None] = {}
    for field in _tensor_fields(first):
        parts = [getattr(weight, field) for weight in weights]
        if field == "order_I":
            if any(not _equal(parts[0], other) for other in parts[1:]):
                raise ValueError(
                    f"{', '.join(names)} order their columns differently, and are one matrix here"
                )
            tensors[field] = parts[0]
        elif field == "zero_OG" and any(part is None for part in parts):
            tensors[field] = _with_zeros(weights)
        else:
            tensors[field] = torch.cat(parts)
    return replace(first, **tensors)


def _with_zeros(weights: Sequence[QuantisedWeight]) -> torch.Tensor | None:
    """Return the zero points of all weights in int8, of which some have none."""
    parts = []
    for weight in weights:
        assert isinstance(weight, Int8Weight)
        scale_OG, zero_OG = weight.scale_OG, weight.zero_OG
        parts.append(torch.zeros(scale_OG.shape, dtype=torch.int8) if zero_OG is None else zero_OG)
    zero_OG = torch.cat(parts)
    return zero_OG if zero_OG.any() else None


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _moved(weight: QuantisedWeight, device: torch.device) -> QuantisedWeight:
    tensors: Mapping[str, torch.Tensor | None] = {
        field: getattr(weight, field) for field in _tensor_fields(weight)
    }
    return replace(weight, **{field: None if t is None else t.to(device) for field, t in tensors.items()})


def _tensor_fields(weight: QuantisedWeight) -> tuple[str, ...]:
    match weight:
        case Int4Weight():
            return "packed_OI", "scale_OG", "zero_OG", "order_I"
        case Int8Weight():
            return "weight_OI", "scale_OG", "zero_OG", "order_I"
        case Fp8Weight():
            return "weight_OI", "scale"
