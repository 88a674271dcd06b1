"""Ropes: the rotary embeddings of models that have one for layers with a window and one for the others.

Owns the two forms in which transformers writes them. Up to version 4 the first has a key of its own, or shares the base
of the second. From 5 on `rope_parameters` has an object for each kind of layer. Scaling is the concern of rope.py.
"""

from typing import Any

from blockyard.worker.model.traits.family import RawConfig, number
from blockyard.worker.unsupported import UnsupportedModelError


def rope_of_full_attention(raw: RawConfig) -> RawConfig:
    """Return config.json with the rope of layers without a window where Llama has that of all layers."""
    by_kind = _ropes_by_kind(raw)
    return raw if by_kind is None else {**raw, "rope_parameters": by_kind.get("full_attention") or {}}


def theta_of_windows(raw: RawConfig, older_key: str) -> float:
    """Return the rotary base of layers with a window. `older_key` has it in files without `rope_parameters`."""
    rope = (_ropes_by_kind(raw) or {}).get("sliding_attention") or {}
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedModelError(
            f"rope_parameters of sliding_attention {rope} in config.json: layers with a window scale no rope"
        )
    return number(rope, "rope_theta") if "rope_theta" in rope else number(raw, older_key)


def _ropes_by_kind(raw: RawConfig) -> dict[str, Any] | None:
    """Return the rope of each kind of layer, or None for files of the older form."""
    ropes = raw.get("rope_parameters")
    is_by_kind = isinstance(ropes, dict) and not ropes.keys().isdisjoint(
        ("full_attention", "sliding_attention")
    )
    return ropes if is_by_kind else None
