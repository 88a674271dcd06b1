"""Qwen2: Llama with biases of queries, keys and values alone, and with windows in some layers."""

from blockyard.worker.model.traits.family import Family, RawConfig, Sizes, Traits
from blockyard.worker.model.traits.windows import qwen_windows


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Qwen2. It has its biases whatever config.json says."""
    return Traits(layer_windows=qwen_windows(raw, sizes), attention_bias=True)


FAMILY = Family(traits=traits)
