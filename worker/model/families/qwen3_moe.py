"""Qwen3-MoE: Qwen3 with experts in place of the MLP of some layers, and with one window or none."""

from dataclasses import replace

from blockyard.worker.model.families import qwen3
from blockyard.worker.model.traits.family import Family, RawConfig, Sizes, Traits
from blockyard.worker.model.traits.mixture import read_mixture, read_sparse_layers
from blockyard.worker.model.traits.windows import one_window


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Qwen3-MoE. Unlike that of Qwen3, its code reads no `max_window_layers`."""
    has_window = raw.get("use_sliding_window", False)
    return replace(
        qwen3.traits({**raw, "layer_types": None}, sizes),
        layer_windows=one_window(raw if has_window else {**raw, "sliding_window": None}, sizes),
        mixture=read_mixture(
            raw,
            inner_rows="moe_intermediate_size",
            normalizes=bool(raw.get("norm_topk_prob", False)),
            sparse_layers=read_sparse_layers(raw, sizes.num_layers),
        ),
    )


FAMILY = Family(traits=traits)
