"""OLMo 3: OLMo 2 with windows in three of four layers, which do not scale their rotary embedding."""

from dataclasses import replace

from blockyard.worker.model.families import olmo2
from blockyard.worker.model.traits.family import RawConfig, Sizes, Traits
from blockyard.worker.model.traits.ropes import rope_of_full_attention, theta_of_windows
from blockyard.worker.model.traits.windows import (
    by_layer_types,
    kinds_by_pattern,
    read_layer_types,
    read_window,
)

FULL_LAYER_EVERY = 4


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of an OLMo 3."""
    kinds = read_layer_types(raw, sizes) or kinds_by_pattern(FULL_LAYER_EVERY, sizes)
    theta = theta_of_windows(raw, "rope_theta")
    return replace(
        olmo2.traits({**raw, "sliding_window": None, "layer_types": None}, sizes),
        layer_windows=by_layer_types(kinds, read_window(raw)),
        layer_rope_thetas=tuple(theta if kind == "sliding_attention" else None for kind in kinds),
    )


FAMILY = replace(
    olmo2.FAMILY,
    traits=traits,
    defaults={**olmo2.FAMILY.defaults, "rope_theta": 500_000.0},
    as_llama=rope_of_full_attention,
)
