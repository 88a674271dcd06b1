"""Mixtral: Mistral with experts in place of the MLP of every layer, and with a window only where one is named."""

from blockyard.worker.model.families import mistral
from blockyard.worker.model.traits.family import Family, RawConfig, Sizes, Traits
from blockyard.worker.model.traits.mixture import MIXTRAL_NAMES, read_mixture
from blockyard.worker.model.traits.windows import one_window


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Mixtral."""
    every = frozenset(range(sizes.num_layers))
    return Traits(
        layer_windows=one_window(raw, sizes, default=None),
        mixture=read_mixture(raw, inner_rows="intermediate_size", normalizes=True, sparse_layers=every),
    )


FAMILY = Family(
    traits=traits,
    allowed=mistral.FAMILY.allowed,
    defaults={"rope_theta": 1e6},
    ignored_names=MIXTRAL_NAMES,
)
