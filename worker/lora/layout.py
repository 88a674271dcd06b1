"""Layout of adapters: the linear layers that an adapter may change, its weights on the host, and each rank's part.

Shapes: L layers, P parts of a fused layer, R rank, I input size, O output size.
"""

from dataclasses import dataclass

import torch
from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.division import ModelPart


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A linear layer as the decoder has it, and the modules of PEFT that are its parts."""

    num_inputs: int
    parts: tuple[tuple[str, int], ...]
    """Module and number of outputs of each part, in order."""

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(width for _, width in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeights:
    """An adapter's weights for one linear layer of all decoder layers. `b` includes the scale."""

    a_LPRI: torch.Tensor
    b_LRO: torch.Tensor


AdapterWeights = dict[str, LinearWeights]
"""The weights of an adapter by name of the linear layer. A layer that it leaves as it is has none."""


def linear_shapes(config: ModelConfig) -> dict[str, LinearShape]:
    """Return the linear layers by their names in `LoraLayer`."""
    hidden, inner, kv = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    width = config.num_heads * config.head_dim
    return {
        "qkv": LinearShape(
            num_inputs=hidden,
            parts=(("self_attn.q_proj", width), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)),
        ),
        "attention_out": LinearShape(num_inputs=width, parts=(("self_attn.o_proj", hidden),)),
        "gate_up": LinearShape(num_inputs=hidden, parts=(("mlp.gate_proj", inner), ("mlp.up_proj", inner))),
        "down": LinearShape(num_inputs=inner, parts=(("mlp.down_proj", hidden),)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPart:
    """The part of a linear layer that one rank has, and where it lies in an adapter's weights.

    A rank has `B` for its outputs, or `A` for its inputs, as it has the layer itself. In the latter case the sum over
    all ranks includes the adapter.
    """

    whole: LinearShape
    shape: LinearShape
    """Sizes of the part. They count padding, which the slices do not."""
    inputs: slice
    outputs: tuple[slice, ...]
    """Outputs within each part of the fused layer."""

    def copy(
        self, a_PRI: torch.Tensor, b_RO: torch.Tensor, *, to_a_PRI: torch.Tensor, to_b_RO: torch.Tensor
    ) -> None:
        """Copy this part of one layer's weights into a slot, and leave the padding there."""
        own_PRI = a_PRI[:, :, self.inputs]
        to_a_PRI[:, :, : own_PRI.shape[2]].copy_(own_PRI)
        sources, targets = b_RO.split(self.whole.widths, dim=1), to_b_RO.split(self.shape.widths, dim=1)
        for source_RO, target_RO, outputs in zip(sources, targets, self.outputs, strict=True):
            own_RO = source_RO[:, outputs]
            target_RO[:, : own_RO.shape[1]].copy_(own_RO)


def linear_parts(part: ModelPart) -> dict[str, LinearPart]:
    """Return the parts that a rank has, by their names in `LoraLayer`."""
    shapes = linear_shapes(part.config)
    return {
        name: _linear_part(whole, shapes[name], part) for name, whole in linear_shapes(part.whole).items()
    }


def _linear_part(whole: LinearShape, shape: LinearShape, part: ModelPart) -> LinearPart:
    places = [part.place(f"{module}.weight") or () for module, _ in whole.parts]
    inputs = places[0][1] if len(places[0]) > 1 else slice(None)  # All parts of a fused layer have one input.
    return LinearPart(whole=whole, shape=shape, inputs=inputs, outputs=tuple(place[0] for place in places))


def slot_bytes(config: ModelConfig, max_rank: int, element_bytes: int) -> int:
    """Return the bytes of one adapter slot in all decoder layers, on a device that holds the whole model."""
    numbers = sum(
        len(shape.parts) * shape.num_inputs + sum(shape.widths) for shape in linear_shapes(config).values()
    )
    return config.num_layers * max_rank * numbers * element_bytes
