"""Mixture of experts: which layers of a model have experts in place of one MLP, and how many a token takes.

Reads it from config.json, and refuses what transformers' code of the architecture would not compute. Owns the names of
experts in a checkpoint. Aux losses and the jitter of a gate belong to training and are ignored. Imports no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockyard.worker.unsupported import UnsupportedModelError

MOST_EXPERTS = 1024
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MIXTRAL_NAMES = {"mlp": "block_sparse_moe"} | {common: name for name, common in _PROJECTIONS.items()}
"""Mixtral's names of parts of an expert's name, by everyone else's."""
_MIXTRAL_EXPERT = re.compile(r"\.experts\.(\d+)\.(w[123])\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a model's sparse layers. The gate of a layer chooses some of them for each token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Inner rows of each expert."""
    normalizes: bool
    """Whether the weights of a token's experts add up to 1."""
    sparse_layers: frozenset[int]
    """Indices of the layers that have experts."""
    scales_inputs: bool = False
    """Whether the sigmoid of its logit scales the input of a token's one expert, and nothing its output."""
    shared_rows: int = 0
    """Inner rows of an expert that every token takes beside the chosen ones. 0: there is none."""
    is_stacked: bool = False
    """Whether a checkpoint has the matrices of all experts in one tensor, with their inputs as rows."""


def read_mixture(
    raw: Mapping[str, Any], *, inner_rows: str, normalizes: bool, sparse_layers: frozenset[int]
) -> Mixture:
    """Return the experts of a model. `inner_rows` is the key with the inner rows of each. Raises
    UnsupportedModelError."""
    named = {key: raw[key] for key in ("num_experts", "num_local_experts") if raw.get(key)}
    if len(set(named.values())) != 1:
        raise UnsupportedModelError(f"{named} in config.json: this architecture needs one number of experts")
    [num_experts] = set(named.values())
    return Mixture(
        num_experts=_count("num_experts", num_experts, MOST_EXPERTS),
        experts_per_token=_count("num_experts_per_tok", raw.get("num_experts_per_tok"), num_experts),
        intermediate_size=_count(inner_rows, raw.get(inner_rows), 2**24),
        normalizes=normalizes,
        sparse_layers=sparse_layers,
    )


def read_sparse_layers(raw: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Return the layers with experts, as Qwen3-MoE names them. Raises UnsupportedModelError."""
    every = _count("decoder_sparse_step", raw.get("decoder_sparse_step", 1), num_layers)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise UnsupportedModelError(f"mlp_only_layers={dense!r} in config.json must be a list of layers")
    return frozenset(set(range(every - 1, num_layers, every)) - set(dense))


def _count(key: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UnsupportedModelError(f"{key}={value!r} in config.json must be a whole number from 1 to {most}")
    return value


def common_name(name: str) -> str:
    """Return the name of a tensor of a sparse layer as Qwen3-MoE has it. Mixtral and Llama 4 have their own."""
    name = name.replace(".block_sparse_moe.", ".mlp.").replace(".feed_forward.", ".mlp.")
    name = name.replace(".mlp.router.", ".mlp.gate.")
    return _MIXTRAL_EXPERT.sub(lambda found: f".experts.{found[1]}.{_PROJECTIONS[found[2]]}.", name)
