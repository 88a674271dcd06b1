"""Phi-3 and Phi-4: Llama with fused matrices in its checkpoints, one attention window, and heads rotated in part."""

from blockyard.worker.model.traits.family import Family, RawConfig, Sizes, Traits, allows
from blockyard.worker.model.traits.windows import one_window


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Phi-3. It has a window only where config.json names one."""
    return Traits(layer_windows=one_window(raw, sizes, default=None))


FAMILY = Family(
    traits=traits,
    allowed={"attention_bias": allows(False, None, why="this architecture has no biases")},
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    stored={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    rotates_part=True,
)
