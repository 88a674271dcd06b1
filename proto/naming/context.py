"""Context: how many tokens a sequence of a model may have, from its config.json. Routers and workers read it alike."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard


def longest_context(config: Mapping[str, Any]) -> int:
    """Return the number of positions that a model is meant for, from the text part of its config.json.

    It is `max_position_embeddings`, except where yarn reaches more, as in vLLM, or where longrope would change its
    factors. By the models' own instructions, yarn is turned on by adding the scaling to config.json and leaving that
    number as it is. A scaling that no worker would load changes nothing. Raises ValueError where the number is none.
    """
    stated = config.get("max_position_embeddings")
    if not _is_count(stated):
        raise ValueError("config.json: max_position_embeddings must be a positive integer")
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, dict):
        # Layers with a window may have a rotary embedding of their own, which is not scaled.
        rope = rope.get("full_attention", rope)
    if not isinstance(rope, dict):
        return stated
    # The top level of config.json wins, as in transformers.
    key = "original_max_position_embeddings"
    original = config.get(key) or rope.get(key) or stated
    if not _is_count(original):
        return stated
    match rope.get("rope_type", rope.get("type")):
        case "longrope" | "su":
            return min(stated, original)
        case "yarn":
            factor = rope.get("factor")
            if isinstance(factor, int | float) and math.isfinite(original * factor):
                return max(stated, int(original * factor))
    return stated


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
