"""OLMo 2: norms behind attention and MLP instead of before them, and of all heads' queries and keys together."""

from blockyard.worker.model.traits.family import Family, RawConfig, Sizes, Traits
from blockyard.worker.model.traits.windows import no_windows


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of an OLMo 2."""
    has_bias = bool(raw.get("attention_bias", False))
    return Traits(
        layer_windows=no_windows(raw, sizes),
        attention_bias=has_bias,
        attention_out_bias=has_bias,
        whole_qk_norm=True,
        pre_norms=False,
        post_norms=True,
        norms_round_once=True,
    )


FAMILY = Family(
    traits=traits,
    defaults={"rms_norm_eps": 1e-5},
    stored={
        "post_attention_layernorm": ("attention_output_norm",),
        "post_feedforward_layernorm": ("mlp_output_norm",),
    },
)
