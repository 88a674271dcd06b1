"""Layout of adapters: the linear layers of a model that an adapter may change, and its weights on the host.

Shapes: L layers, P parts of a fused layer, R rank, I input size, O output size.
"""

from dataclasses import dataclass

import torch
from blockyard.worker.model.config import ModelConfig


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


def slot_bytes(config: ModelConfig, max_rank: int, element_bytes: int) -> int:
    """Return the bytes of one adapter slot in all decoder layers, on a device that holds the whole model."""
    numbers = sum(
        len(shape.parts) * shape.num_inputs + sum(shape.widths) for shape in linear_shapes(config).values()
    )
    return config.num_layers * max_rank * numbers * element_bytes
