"""Adapters as the decoder uses them: the slots of each layer, and which tokens of a step use which slot.

Does not own what a slot holds (worker/lora/).
"""

from dataclasses import dataclass

from blockyard.kernels.lora import LoraLinear, LoraPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLayer:
    """The adapters of one layer's linears."""

    qkv: LoraLinear
    attention_out: LoraLinear
    gate_up: LoraLinear
    down: LoraLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraStep:
    """The adapters of one step."""

    layers: tuple[LoraLayer, ...]
    plan: LoraPlan
    rows_plan: LoraPlan | None = None
    """The plan of the wanted rows alone, behind the last attention. None where all tokens are computed there."""
