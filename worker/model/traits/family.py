"""Family: the contract of a family's module, and the traits in which layers differ.

Everything that a family does not say is as in Llama. Nothing here names an architecture.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from blockyard.worker.model.traits.mixture import Mixture
from blockyard.worker.unsupported import UnsupportedModelError

RawConfig = Mapping[str, Any]
"""The content of config.json."""
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model that its traits depend on."""

    num_layers: int
    hidden_size: int
    head_dim: int
    longest_context: int
    """Positions that the model is meant for, including its rope scaling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """The factor of a query at a position: 1 + beta * ln(1 + floor((position + offset) / every))."""

    beta: float
    every: int
    offset: int
    layers: frozenset[int]
    """Indices of the layers that scale their queries."""


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
    whole_qk_norm: bool = False
    """Whether queries, and likewise keys, are normalised over all heads together instead. Such a model is not
    divided."""
    weightless_qk_norm: bool = False
    """Whether queries and keys are normalised without weights instead, in layers that rotate them."""
    rotated_layers: tuple[bool, ...] = ()
    """Whether each layer rotates queries and keys. Empty: all do."""
    rotates_adjacent: bool = False
    """Whether adjacent dimensions of a head turn together, and not those of its halves."""
    query_scaling: QueryScaling | None = None
    most_positions: int | None = None
    """The longest context for which these traits say how the layers compute. None: any."""
    pre_norms: bool = True
    """Whether the input of attention and MLP is normalised."""
    post_norms: bool = False
    """Whether the output of attention and MLP is normalised before it is added to the residual."""
    norm_offset: float = 0.0
    """Number to add to every norm's weight in the checkpoint."""
    norms_round_once: bool = False
    """Whether a norm rounds the product with its weight alone. Its weights are then kept in fp32."""
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    """Factor of the embeddings, rounded to the data type of the weights."""
    attention_scale: float | None = None
    """Factor of the products of queries and keys. None: 1 / sqrt(head size)."""
    residual_scale: float = 1.0
    """Factor of the output of attention and MLP before it is added to the residual."""
    logits_scale: float = 1.0
    mixture: Mixture | None = None
    """The experts of sparse layers. None: every layer has one MLP."""
    layer_rope_thetas: tuple[float | None, ...] = ()
    """Base of each layer's rotary frequencies, which are then not scaled. None: as config.json says for the model.
    Empty: None for all layers."""


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
    defaults: RawConfig = field(default_factory=dict)
    """Values of keys that config.json may lack, where transformers has others for this family than for Llama."""
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of a layer's modules in a checkpoint, where they are not Llama's: each with Llama's name for it. One that
    holds several matrices has a name for each, in the order of its rows."""
    ignored_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of a module's name, with what lists of modules in a `quantization_config` have in their place, beside
    `stored`."""
    text_models: Mapping[str, RawConfig] = field(default_factory=dict)
    """Each `model_type` of `text_config` in the config.json of a model that also reads images, with its own `defaults`.
    The first is that of a `text_config` without any. Only the text part is loaded. Empty: it reads text alone."""
    rotates_part: bool = False
    """Whether `partial_rotary_factor` says how much of a head is rotated."""
    as_llama: Callable[[RawConfig], RawConfig] = lambda raw: raw
    """Returns config.json with the rotary embedding, and the sizes, where Llama has them."""

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """Return runs of parts of Llama's names of modules, each with what a checkpoint has in its place."""
        fused = ((part, module) for module, parts in self.stored.items() for part in parts)
        return *fused, *self.ignored_names.items()


def allows(*values: object, why: str) -> Allowed:
    return Allowed(values=values, why=why)


def number(raw: RawConfig, key: str, default: float = 1.0) -> float:
    """Return a factor of config.json. Raises UnsupportedModelError where it is none to multiply by."""
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedModelError(f"{key}={value!r} in config.json must be a positive number")
    return float(value)


def count(raw: RawConfig, key: str) -> int:
    """Return a number of config.json that counts something. Raises UnsupportedModelError where it is none."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"{key}={value!r} in config.json must be a positive whole number")
    return value


def refuse_others(raw: RawConfig, allowed: Mapping[str, Allowed]) -> None:
    """Raise UnsupportedModelError for the first key with a value that is not allowed."""
    for key, of_key in allowed.items():
        if raw.get(key) not in of_key.values:
            raise UnsupportedModelError(f"{key}={raw[key]!r} in config.json: {of_key.why}")
