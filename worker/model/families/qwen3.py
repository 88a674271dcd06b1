"""Qwen3: Llama with a norm of each query and key head, and with windows in some layers."""

from blockyard.worker.model.traits.family import Family, RawConfig, Sizes, Traits
from blockyard.worker.model.traits.windows import qwen_windows


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Qwen3. Where it has biases, it has all four."""
    has_bias = bool(raw.get("attention_bias", False))
    return Traits(
        layer_windows=qwen_windows(raw, sizes),
        attention_bias=has_bias,
        attention_out_bias=has_bias,
        qk_norm=True,
    )


FAMILY = Family(traits=traits)
