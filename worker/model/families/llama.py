"""Llama: the family from which the others differ. Its attention has four biases or none."""

from blockyard.worker.model.traits.family import Family, RawConfig, Sizes, Traits
from blockyard.worker.model.traits.windows import no_windows


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a model whose layers are Llama's."""
    has_bias = bool(raw.get("attention_bias", False))
    return Traits(layer_windows=no_windows(raw, sizes), attention_bias=has_bias, attention_out_bias=has_bias)


FAMILY = Family(traits=traits)
