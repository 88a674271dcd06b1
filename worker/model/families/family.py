"""Family: the contract of a family's module, and the traits in which layers differ.

Everything that a family does not say is as in Llama. Nothing here names an architecture.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

RawConfig = Mapping[str, Any]
"""The content of config.json."""


class UnsupportedModelError(ValueError):
    """The model needs something that this engine does not have. The message names the field and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model that its traits depend on."""

    num_layers: int
    longest_context: int
    """Positions that the model is meant for, including its rope scaling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a model's layers compute. The decoder asks for these, and never for an architecture."""

    layer_windows: tuple[int | None, ...]
    """Attention window of each layer in tokens, the query itself included. None for no window."""
    attention_bias: bool = False
    """Whether queries, keys and values have a bias."""
    attention_out_bias: bool = False
    """Whether the projection after attention has a bias too."""
    qk_norm: bool = False
    """Whether each head's query and key are normalised before the rotation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The values that a key of config.json may have. Any other is refused."""

    values: tuple[object, ...]
    why: str
    """The reason, for the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table of architectures."""

    traits: Callable[[RawConfig, Sizes], Traits]
    """Reads the traits. Raises UnsupportedModelError. Windows may be longer than the longest context."""
    allowed: Mapping[str, Allowed] = field(default_factory=dict)
    """Keys of config.json that the family's own code reads, and this engine only with these values."""


def allows(*values: object, why: str) -> Allowed:
    return Allowed(values=values, why=why)


def refuse_others(raw: RawConfig, allowed: Mapping[str, Allowed]) -> None:
    """Raise UnsupportedModelError for the first key with a value that is not allowed."""
    for key, of_key in allowed.items():
        if raw.get(key) not in of_key.values:
            raise UnsupportedModelError(f"{key}={raw[key]!r} in config.json: {of_key.why}")
