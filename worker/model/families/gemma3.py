"""Gemma 3: four norms a layer, GELU, scaled embeddings, and windows in five of six layers.

Layers with a window have a rotary base of their own, and their rotary embedding is not scaled. Of a model that also
reads images, only the text part is loaded.
"""

from dataclasses import replace

from blockyard.worker.model.traits.family import (
    Family,
    RawConfig,
    Sizes,
    Traits,
    allows,
    number,
)
from blockyard.worker.model.traits.ropes import rope_of_full_attention, theta_of_windows
from blockyard.worker.model.traits.windows import (
    by_layer_types,
    kinds_by_pattern,
    read_layer_types,
    read_window,
)

_NO_CAPPING = allows(None, why="the decoder caps no logits")
_GELU = "this architecture computes GELU with tanh only"


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Gemma 3."""
    kinds = read_layer_types(raw, sizes) or kinds_by_pattern(raw.get("sliding_window_pattern"), sizes)
    local_theta = theta_of_windows(raw, "rope_local_base_freq")
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
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
    },
    stored={
        "post_attention_layernorm": ("attention_output_norm",),
        "pre_feedforward_layernorm": ("post_attention_layernorm",),
        "post_feedforward_layernorm": ("mlp_output_norm",),
    },
    as_llama=rope_of_full_attention,
)
WITH_IMAGES = replace(FAMILY, text_models={"gemma3_text": {}})
