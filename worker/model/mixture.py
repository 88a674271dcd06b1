"""Mixture of experts: which layers of a model have experts in place of one MLP, and how many a token takes.

Reads it from config.json, and refuses what transformers' code of the architecture would not compute. Owns the names of
experts in a checkpoint. Aux losses and the jitter of a gate belong to training and are ignored. Imports no torch.
"""

import re
from dataclasses import dataclass
from typing import Any

from blockyard.worker.model.rope import UnsupportedModelError

MOST_EXPERTS = 1024
ARCHITECTURES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
_SHARED = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size")
# Mixtral's names of the projections of an expert, and everyone else's.
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
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


def read_mixture(raw: dict[str, Any], architecture: str, num_layers: int) -> Mixture | None:
    """Return the experts of a model, or None for a dense one. Raises UnsupportedModelError."""
    for key in _SHARED:
        if raw.get(key):
            raise UnsupportedModelError(
                f"{key}={raw[key]!r} in config.json: shared experts are not supported"
            )
    named = {key: raw[key] for key in ("num_experts", "num_local_experts") if raw.get(key)}
    if architecture not in ARCHITECTURES:
        for key, value in named.items():
            raise UnsupportedModelError(f"{key}={value!r} in config.json: {architecture} has no experts")
        return None
    if len(set(named.values())) != 1:
        raise UnsupportedModelError(f"{named} in config.json: {architecture} needs one number of experts")
    [num_experts] = set(named.values())
    is_mixtral = architecture == "MixtralForCausalLM"
    return Mixture(
        num_experts=_count("num_experts", num_experts, MOST_EXPERTS),
        experts_per_token=_count("num_experts_per_tok", raw.get("num_experts_per_tok"), num_experts),
        intermediate_size=_inner_rows(raw, "intermediate_size" if is_mixtral else "moe_intermediate_size"),
        normalizes=is_mixtral or bool(raw.get("norm_topk_prob", False)),
        sparse_layers=frozenset(range(num_layers)) if is_mixtral else _sparse_layers(raw, num_layers),
    )


def _sparse_layers(raw: dict[str, Any], num_layers: int) -> frozenset[int]:
    every = raw.get("decoder_sparse_step", 1)
    _count("decoder_sparse_step", every, num_layers)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise UnsupportedModelError(f"mlp_only_layers={dense!r} in config.json must be a list of layers")
    return frozenset(set(range(every - 1, num_layers, every)) - set(dense))


def _inner_rows(raw: dict[str, Any], key: str) -> int:
    return _count(key, raw.get(key), 2**24)


def _count(key: str, value: object, most: int) -> int:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise UnsupportedModelError(f"{key}={value!r} in config.json must be a whole number from 1 to {most}")
    return value


def common_name(name: str) -> str:
    """Return the name of a tensor of a sparse layer as Qwen3-MoE has it. Mixtral has names of its own."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return _MIXTRAL_EXPERT.sub(lambda found: f".experts.{found[1]}.{_PROJECTIONS[found[2]]}.", name)
