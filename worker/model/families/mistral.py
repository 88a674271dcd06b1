"""Mistral: Llama with the same attention window in every layer, and without biases.

Ministral 3 scales queries by their position, from the end of its original context on. Of a model that also reads
images, only the text part is loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blockyard.worker.model.traits.family import (
    Family,
    QueryScaling,
    RawConfig,
    Sizes,
    Traits,
    allows,
    count,
    number,
)
from blockyard.worker.model.traits.windows import DEFAULT_WINDOW, one_window

_SCALING = "llama_4_scaling_beta"
_SCALING_KEYS = (_SCALING, "max_position_embeddings")
MINISTRAL = "ministral3"


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Mistral. Its code has a window where config.json does not mention one."""
    return Traits(layer_windows=one_window(raw, sizes), query_scaling=_query_scaling(raw, sizes))


def _query_scaling(raw: RawConfig, sizes: Sizes) -> QueryScaling | None:
    rope = raw.get("rope_parameters") or {}
    if raw.get("model_type") != MINISTRAL or not rope.get(_SCALING):
        return None
    return QueryScaling(
        beta=number(rope, _SCALING),
        every=count(rope, "original_max_position_embeddings"),
        offset=0,
        layers=frozenset(range(sizes.num_layers)),
    )


def as_llama(raw: RawConfig) -> Mapping[str, Any]:
    """Return config.json without what says how a Ministral 3 scales queries."""
    rope = raw.get("rope_parameters")
    if raw.get("model_type") != MINISTRAL or not isinstance(rope, dict):
        return raw
    return {**raw, "rope_parameters": {key: value for key, value in rope.items() if key not in _SCALING_KEYS}}


_MINISTRAL_DEFAULTS: RawConfig = {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "max_position_embeddings": 262_144,
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        _SCALING: 0.1,
    },
    "sliding_window": None,
    "vocab_size": 131_072,
}
FAMILY = Family(
    traits=traits,
    allowed={"attention_bias": allows(False, None, why="this architecture has no biases")},
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": DEFAULT_WINDOW,
        "vocab_size": 32_000,
    },
    as_llama=as_llama,
)
MINISTRAL3 = replace(FAMILY, defaults=_MINISTRAL_DEFAULTS)
WITH_IMAGES = replace(FAMILY, text_models={"mistral": {}, MINISTRAL: _MINISTRAL_DEFAULTS})
"""Mistral 3, and Ministral 3 with a part that reads images."""
