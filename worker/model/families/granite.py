"""Granite: Llama with a factor each for embeddings, attention, residuals and logits."""

from dataclasses import replace

from blockyard.worker.model.families import llama
from blockyard.worker.model.traits.family import Family, RawConfig, Sizes, Traits, number


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Granite. Its attention factor takes the place of 1 / sqrt(head size)."""
    return replace(
        llama.traits(raw, sizes),
        embedding_scale=number(raw, "embedding_multiplier"),
        attention_scale=number(raw, "attention_multiplier"),
        residual_scale=number(raw, "residual_multiplier"),
        logits_scale=1.0 / number(raw, "logits_scaling"),
    )


FAMILY = Family(traits=traits)
