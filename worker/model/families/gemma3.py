"""Gemma 3, text alone: four norms a layer, GELU, scaled embeddings, and windows in five of six layers.

Layers with a window have a rotary base of their own, and their rotary embedding is not scaled.
"""

from typing import Any

from blockyard.worker.model.families.family import (
    Family,
    RawConfig,
    Sizes,
    Traits,
    UnsupportedModelError,
    allows,
    number,
)
from blockyard.worker.model.families.windows import by_layer_types, read_layer_types, read_window

_NO_CAPPING = allows(None, why="the decoder caps no logits")
_GELU = "this architecture computes GELU with tanh only"


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Gemma 3."""
    kinds = read_layer_types(raw, sizes) or _kinds_by_pattern(raw, sizes)
    local_theta = _local_theta(raw)
    has_bias = bool(raw.get("attention_bias", False))
    return Traits(
        layer_windows=by_layer_types(kinds, read_window(raw)),
        layer_rope_thetas=tuple(local_theta if kind == "sliding_attention" else None for kind in kinds),
        attention_bias=has_bias,
        attention_out_bias=has_bias,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        norms_round_once=True,
        activation="gelu_tanh",
        embedding_scale=sizes.hidden_size**0.5,
        attention_scale=number(raw, "query_pre_attn_scalar") ** -0.5,
    )


def rope_of_full_attention(raw: RawConfig) -> RawConfig:
    """Return config.json with the rope of layers without a window where Llama has that of all layers."""
    by_kind = _ropes_by_kind(raw)
    return raw if by_kind is None else {**raw, "rope_parameters": by_kind.get("full_attention") or {}}


def _ropes_by_kind(raw: RawConfig) -> dict[str, Any] | None:
    """Return the rope of each kind of layer as transformers 5 writes it, or None for earlier files."""
    ropes = raw.get("rope_parameters")
    is_by_kind = isinstance(ropes, dict) and any(
        kind in ropes for kind in ("full_attention", "sliding_attention")
    )
    return ropes if is_by_kind else None


def _local_theta(raw: RawConfig) -> float:
    rope = (_ropes_by_kind(raw) or {}).get("sliding_attention") or {}
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedModelError(
            f"rope_parameters of sliding_attention {rope} in config.json: layers with a window scale no rope"
        )
    return number({**raw, **rope}, "rope_theta" if "rope_theta" in rope else "rope_local_base_freq")


def _kinds_by_pattern(raw: RawConfig, sizes: Sizes) -> list[str]:
    every = raw.get("sliding_window_pattern")
    if not isinstance(every, int) or every < 1:
        raise UnsupportedModelError(
            f"sliding_window_pattern={every!r} in config.json must be a positive whole number"
        )
    return [
        "sliding_attention" if (index + 1) % every else "full_attention" for index in range(sizes.num_layers)
    ]


FAMILY = Family(
    traits=traits,
    allowed={
        "hidden_act": allows("gelu_pytorch_tanh", None, why=_GELU),
        "hidden_activation": allows("gelu_pytorch_tanh", why=_GELU),
        "attn_logit_softcapping": _NO_CAPPING,
        "final_logit_softcapping": _NO_CAPPING,
    },
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    stored={
        "post_attention_layernorm": ("attention_output_norm",),
        "pre_feedforward_layernorm": ("post_attention_layernorm",),
        "post_feedforward_layernorm": ("mlp_output_norm",),
    },
    rope=rope_of_full_attention,
)
