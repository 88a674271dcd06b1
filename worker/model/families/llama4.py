"""Llama 4: adjacent pairs are rotated, in every fourth layer none, and most layers have experts beside a shared one.

Layers that rotate attend within chunks, which change nothing within the first one. So contexts end with it. The other
layers scale queries by their position. Of a model that also reads images, only the text part is loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blockyard.worker.model.traits.family import (
    Family,
    QueryScaling,
    RawConfig,
    Sizes,
    Traits,
    allows,
    count,
    number,
)
from blockyard.worker.model.traits.mixture import Mixture, read_mixture
from blockyard.worker.unsupported import UnsupportedModelError


def traits(raw: RawConfig, sizes: Sizes) -> Traits:
    """Return the traits of a Llama 4."""
    rotated = _rotated_layers(raw, sizes)
    has_bias = bool(raw.get("attention_bias", False))
    has_chunks = any(rotated) and raw["attention_chunk_size"] is not None
    return Traits(
        layer_windows=(None,) * sizes.num_layers,
        attention_bias=has_bias,
        attention_out_bias=has_bias,
        rotated_layers=rotated,
        rotates_adjacent=True,
        weightless_qk_norm=bool(raw["use_qk_norm"]),
        query_scaling=_query_scaling(raw, rotated),
        most_positions=count(raw, "attention_chunk_size") if has_chunks else None,
        mixture=_mixture(raw, sizes),
    )


def _rotated_layers(raw: RawConfig, sizes: Sizes) -> tuple[bool, ...]:
    every = count(raw, "no_rope_layer_interval")
    listed = raw.get("no_rope_layers") or [(index + 1) % every != 0 for index in range(sizes.num_layers)]
    # In spite of its name, it has 1 where a layer rotates.
    rotated = tuple(bool(rotates) for rotates in listed[: sizes.num_layers])
    kinds = ["chunked_attention" if rotates else "full_attention" for rotates in rotated]
    if len(rotated) != sizes.num_layers or raw.get("layer_types") not in (None, kinds):
        raise UnsupportedModelError(
            f"no_rope_layers={listed} and layer_types={raw.get('layer_types')} in config.json: layers attend within "
            "chunks where they rotate, and there alone"
        )
    return rotated


def _query_scaling(raw: RawConfig, rotated: tuple[bool, ...]) -> QueryScaling | None:
    if not raw["attn_temperature_tuning"] or raw["attn_scale"] == 0:
        return None
    return QueryScaling(
        beta=number(raw, "attn_scale"),
        every=count(raw, "floor_scale"),
        offset=1,
        layers=frozenset(index for index, rotates in enumerate(rotated) if not rotates),
    )


def _mixture(raw: RawConfig, sizes: Sizes) -> Mixture:
    every = count(raw, "interleave_moe_layer_step")
    listed = raw.get("moe_layers")
    sparse = range(every - 1, sizes.num_layers, every) if listed is None else listed
    if not set(sparse) <= set(range(sizes.num_layers)):
        raise UnsupportedModelError(
            f"moe_layers={listed} in config.json must be layers from 0 to {sizes.num_layers - 1}"
        )
    mixture = read_mixture(
        raw, inner_rows="intermediate_size", normalizes=True, sparse_layers=frozenset(sparse)
    )
    return replace(mixture, scales_inputs=True, is_stacked=True, shared_rows=mixture.intermediate_size)


def as_llama(raw: RawConfig) -> Mapping[str, Any]:
    """Return config.json with the inner rows of layers without experts where Llama has them."""
    return {**raw, "intermediate_size": raw["intermediate_size_mlp"]}


FAMILY = Family(
    traits=traits,
    allowed={"num_experts_per_tok": allows(1, why="a token takes one expert here")},
    defaults={
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "max_position_embeddings": 131_072,
        "no_rope_layer_interval": 4,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "use_qk_norm": True,
        "vocab_size": 202_048,
    },
    ignored_names={"mlp": "feed_forward"},
    as_llama=as_llama,
)
WITH_IMAGES = replace(FAMILY, text_models={"llama4_text": {}})
