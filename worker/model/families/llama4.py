"""Llama 4: adjacent pairs turn, every fourth layer turns nothing, and most layers have experts beside a shared one.

Layers that turn attend within chunks, and the others scale queries by their position. Both change nothing within the
first chunk, so contexts end with it. Of a model that also reads images, only the text part is loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blockyard.worker.model.traits.family import Family, RawConfig, Sizes, Traits, allows
from blockyard.worker.model.traits.mixture import Mixture, read_mixture
from blockyard.worker.unsupported import UnsupportedModelError


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Llama 4."""
    rotated = _rotated_layers(raw, sizes)
    has_bias = bool(raw.get("attention_bias", False))
    return Traits(
        layer_windows=(None,) * sizes.num_layers,
        attention_bias=has_bias,
        attention_out_bias=has_bias,
        rotated_layers=rotated,
        turns_adjacent=True,
        bare_qk_norm=bool(raw["use_qk_norm"]),
        most_positions=_exact_positions(raw, rotated),
        mixture=_mixture(raw, sizes),
    )


def _rotated_layers(raw: RawConfig, sizes: Sizes) -> tuple[bool, ...]:
    every = raw["no_rope_layer_interval"]
    listed = raw.get("no_rope_layers") or [(index + 1) % every != 0 for index in range(sizes.num_layers)]
    # By its name it would list the others.
    rotated = tuple(bool(turns) for turns in listed[: sizes.num_layers])
    kinds = ["chunked_attention" if turns else "full_attention" for turns in rotated]
    if len(rotated) != sizes.num_layers or raw.get("layer_types") not in (None, kinds):
        raise UnsupportedModelError(
            f"no_rope_layers={listed} and layer_types={raw.get('layer_types')} in config.json: layers attend within "
            "chunks where they turn, and there alone"
        )
    return rotated


def _exact_positions(raw: RawConfig, rotated: tuple[bool, ...]) -> int | None:
    """Return up to how many positions neither chunks nor scaled queries change anything."""
    limits = []
    if any(rotated) and raw["attention_chunk_size"] is not None:
        limits.append(_at_least("attention_chunk_size", raw["attention_chunk_size"], 1))
    if not all(rotated) and raw["attn_temperature_tuning"]:
        limits.append(_at_least("floor_scale", raw["floor_scale"], 2) - 1)
    return min(limits, default=None)


def _mixture(raw: RawConfig, sizes: Sizes) -> Mixture:
    every = _at_least("interleave_moe_layer_step", raw["interleave_moe_layer_step"], 1)
    sparse = raw.get("moe_layers") or range(every - 1, sizes.num_layers, every)
    mixture = read_mixture(
        raw, inner_rows="intermediate_size", normalizes=True, sparse_layers=frozenset(sparse)
    )
    return replace(mixture, scores_inputs=True, is_stacked=True, shared_rows=mixture.intermediate_size)


def _at_least(key: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UnsupportedModelError(
            f"{key}={value!r} in config.json must be a whole number of at least {least}"
        )
    return value


def as_llama(raw: RawConfig) -> Mapping[str, Any]:
    """Return config.json with the inner rows of layers without experts where Llama has them."""
    return {**raw, "intermediate_size": raw["intermediate_size_mlp"]}


FAMILY = Family(
    traits=traits,
    allowed={"num_experts_per_tok": allows(1, why="a token takes one expert here")},
    defaults={
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "head_dim": 128,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "max_position_embeddings": 131_072,
        "no_rope_layer_interval": 4,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "use_qk_norm": True,
    },
    as_llama=as_llama,
)
WITH_IMAGES = replace(FAMILY, text_models=("llama4_text",))
