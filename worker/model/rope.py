"""Rope scaling: how a model stretches its rotary embedding over longer contexts, from its config.json.

Owns the two forms in which transformers writes it. Up to version 4 that is `rope_scaling` with the base beside it, from
5 on `rope_parameters` with the base inside. Owns the refusal of every kind and key that `rotary_table` does not
compute. Imports no torch. The semantics are those of transformers' `modeling_rope_utils`.
"""

import math
from dataclasses import dataclass
from typing import Any

from blockyard.worker.model.traits.family import RawConfig, number
from blockyard.worker.unsupported import UnsupportedModelError

DEFAULT_THETA = 10_000.0
_ORIGINAL = "original_max_position_embeddings"
_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "original_max_position_embeddings",
    },
    "longrope": {
        "factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings",
    },
}  # fmt: skip
_OLD_NAMES = {"su": "longrope"}
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Keys that say how a checkpoint was made, and do not change what it computes.
_REMARKS = {"finetuned"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every position is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Waves longer than the original context are slowed by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Dimensions that turn rarely within the original context are slowed by `factor`.

    A linear ramp leads from `beta_slow` to `beta_fast` turns. Cosines and sines are scaled by `attention_factor`.
    """

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the ends of the ramp are rounded outwards to whole dimensions."""
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Each frequency is divided by its short factor. Cosines and sines are scaled by `attention_factor`.

    Beyond the original context the model has other factors, for all positions at once. So keys of a sequence that grows
    past it would have to be computed again, and the model is served up to there.
    """

    short_factors: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


def read_rope_theta(raw: RawConfig) -> float:
    """Return the base of the rotary frequencies. Raises UnsupportedModelError where it is none."""
    given = next((one for one in (_rope(raw), raw) if one.get("rope_theta") is not None), {})
    return number(given, "rope_theta", DEFAULT_THETA)


def read_rotary_dim(raw: RawConfig, head_dim: int, *, can_be_less: bool) -> int:
    """Return the dimensions of a head that are rotated. Raises UnsupportedModelError where they are to be all, and are
    not, or where they have no halves."""
    factor = _rope(raw).get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    if factor == 1:
        return head_dim
    if not can_be_less:
        raise UnsupportedModelError(
            f"partial_rotary_factor={factor!r} in config.json: heads are rotated whole"
        )
    rotary_dim = int(head_dim * factor) if _is_factor(factor) else 0
    if not 0 < rotary_dim < head_dim or rotary_dim % 2:
        raise UnsupportedModelError(
            f"partial_rotary_factor={factor!r} in config.json: it leaves {rotary_dim} of {head_dim} dimensions"
        )
    return rotary_dim


def read_rope_scaling(raw: RawConfig, max_position_embeddings: int, rotary_dim: int) -> RopeScaling | None:
    """Return the scaling, or None if the embedding is not scaled.

    Raises UnsupportedModelError for a kind, a key or a value that cannot be computed as transformers would.
    """
    rope = _rope(raw)
    named = rope.get("rope_type", rope.get("type", "default"))
    kind = _OLD_NAMES.get(named, named)
    _refuse_unknown(rope, kind)
    # The top level of config.json wins over the object with the other keys, as in transformers.
    stated = raw.get(_ORIGINAL) or rope.get(_ORIGINAL)
    original = max_position_embeddings
    if stated is not None:
        original = int(number({_ORIGINAL: stated}, _ORIGINAL))
    match kind:
        case "linear":
            return LinearScaling(factor=_factor(rope, "factor"))
        case "llama3":
            low, high = _factor(rope, "low_freq_factor", 0.0), _factor(rope, "high_freq_factor", 0.0)
            if high < low:
                raise UnsupportedModelError(
                    f"rope scaling {rope}: high_freq_factor must not be below low_freq_factor"
                )
            return Llama3Scaling(
                factor=_factor(rope, "factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=original,
            )
        case "yarn":
            return _yarn(rope, max_position_embeddings, original)
        case "longrope":
            return _longrope(rope, max_position_embeddings, original, rotary_dim // 2)
        case _:
            return None


def _rope(raw: RawConfig) -> dict[str, Any]:
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModelError(f"rope scaling {rope!r} in config.json must be a JSON object")
    return rope


def _refuse_unknown(rope: dict[str, Any], kind: object) -> None:
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedModelError(
            f"rope scaling {rope} in config.json: {kind!r} is not one of {', '.join(_KEYS)}"
        )
    unknown = {key for key, value in rope.items() if value is not None}
    unknown -= _KEYS[kind] | _COMMON_KEYS | _REMARKS
    # A default rope reads none of the scaling's keys, whatever they say.
    if kind == "default":
        unknown -= {key for keys in _KEYS.values() for key in keys}
    if unknown:
        raise UnsupportedModelError(
            f"rope scaling {rope} in config.json: {sorted(unknown)} is not known for rope_type {kind!r}"
        )


def _yarn(rope: dict[str, Any], max_position_embeddings: int, original: int) -> YarnScaling:
    factor = max_position_embeddings / original if rope.get("factor") is None else _factor(rope, "factor")
    attention_factor = _optional(rope, "attention_factor")
    if attention_factor is None:
        scales = _optional(rope, "mscale"), _optional(rope, "mscale_all_dim")
        attention_factor = _yarn_attention_factor(factor, *scales)
    return YarnScaling(
        factor=factor,
        attention_factor=attention_factor,
        beta_fast=_optional(rope, "beta_fast") or 32.0,
        beta_slow=_optional(rope, "beta_slow") or 1.0,
        truncate=bool(rope.get("truncate", True)),
        original_max_position_embeddings=original,
    )


def _longrope(
    rope: dict[str, Any], max_position_embeddings: int, original: int, num_frequencies: int
) -> LongRopeScaling:
    short = rope.get("short_factor")
    if not isinstance(short, list) or len(short) != num_frequencies or not all(map(_is_factor, short)):
        raise UnsupportedModelError(
            f"rope scaling {rope} in config.json: short_factor={short!r} must be {num_frequencies} positive numbers"
        )
    attention_factor = _optional(rope, "attention_factor")
    if attention_factor is None:
        stated = rope.get("factor")
        factor = max_position_embeddings / original if stated is None else _factor(rope, "factor")
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factors=tuple(map(float, short)),
        attention_factor=attention_factor,
        original_max_position_embeddings=original,
    )


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the factor that compensates the flatter softmax over a stretched context, by yarn's paper."""

    def of(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)


def _factor(rope: dict[str, Any], key: str, least: float = 1.0) -> float:
    value = rope.get(key)
    if not isinstance(value, int | float) or not _is_factor(value) or value < least:
        raise UnsupportedModelError(
            f"rope scaling {rope} in config.json: {key}={value!r} is no number to scale by"
        )
    return float(value)


def _optional(rope: dict[str, Any], key: str) -> float | None:
    """Return a number that may be missing. So is 0, which transformers reads as if it were."""
    return _factor(rope, key, 0.0) if rope.get(key) else None
