"""Mistral: Llama with the same attention window in every layer, and without biases."""

from dataclasses import replace

from blockyard.worker.model.traits.family import Family, RawConfig, Sizes, Traits, allows
from blockyard.worker.model.traits.windows import one_window


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Mistral. Its code has a window where config.json does not mention one."""
    return Traits(layer_windows=one_window(raw, sizes))


FAMILY = Family(
    traits=traits, allowed={"attention_bias": allows(False, None, why="this architecture has no biases")}
)
WITH_IMAGES = replace(FAMILY, text_model="mistral")
"""Mistral 3: Mistral with a part that reads images, which is not loaded."""
