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
_OF_SCALING = (_SCALING, "max_position_embeddings")


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Mistral. Its code has a window where config.json does not mention one, Ministral 3's
    none."""
    default = None if raw.get("model_type") == "ministral3" else DEFAULT_WINDOW
    return Traits(layer_windows=one_window(raw, sizes, default), query_scaling=_query_scaling(raw, sizes))


def _query_scaling(raw: RawConfig, sizes: Sizes) -> QueryScaling | None:
    rope = raw.get("rope_parameters") or {}
    if not rope.get(_SCALING):
        return None
    return QueryScaling(
        beta=number(rope, _SCALING),
        every=count(rope, "original_max_position_embeddings"),
        offset=0,
        layers=frozenset(range(sizes.num_layers)),
    )


def as_llama(raw: RawConfig) -> Mapping[str, Any]:
    """Return config.json without what says how queries are scaled."""
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict) or _SCALING not in rope:
        return raw
    return {**raw, "rope_parameters": {key: value for key, value in rope.items() if key not in _OF_SCALING}}


FAMILY = Family(
    traits=traits,
    allowed={"attention_bias": allows(False, None, why="this architecture has no biases")},
    as_llama=as_llama,
)
WITH_IMAGES = replace(FAMILY, text_models=("mistral", "ministral3"))
"""Mistral 3, and Ministral 3 with a part that reads images."""
