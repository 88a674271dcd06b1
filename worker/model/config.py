"""Model config: reads from a Hugging Face folder's config.json whether and how this engine runs a model.

Owns the refusal of everything that it cannot run exactly. A key of the file that changes the arithmetic is read
here, in `rope` or by the model's family (families/). Otherwise the error names it. Does not read tokenizers or weights,
but for a head that is said to be tied (tied_head.py), and does not import torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from blockyard.proto.naming import model_files
from blockyard.proto.naming.context import longest_context
from blockyard.proto.naming.end_tokens import end_tokens, tokenizers_end
from blockyard.proto.naming.pooling import POOLING_FILES, Pooling, read_pooling
from blockyard.worker.model.families.table import FAMILIES, find_architecture
from blockyard.worker.model.quantisation.scheme import QuantScheme, read_scheme
from blockyard.worker.model.rope import (
    RopeScaling,
    read_rope_scaling,
    read_rope_theta,
    read_rotary_dim,
)
from blockyard.worker.model.traits.family import (
    Family,
    RawConfig,
    Sizes,
    Traits,
    allows,
    number,
    refuse_others,
)
from blockyard.worker.unsupported import UnsupportedModelError

DataTypeName = Literal["float32", "bfloat16", "float16"]

MAX_SIZE = 2**24
"""Upper bound of any size in a config.json, ten times that of any model. Some sizes become lists before weights are
checked."""
MAX_LAYERS = 1024
"""Upper bound of the layers. Each has a name for every tensor, those of its experts included."""
HUB_PATTERNS = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja")
# Mistral's repositories hold the same weights a second time in a format of their own.
HUB_IGNORED_PATTERNS = ("consolidated*",)
HUB_CONFIG_PATTERNS = ("config.json", "generation_config.json", *POOLING_FILES)
"""Files that say whether a model can be run, without its weights."""
_EARLIER_ALONE = "the decoder attends to earlier tokens only"
_NO_EXPERTS = allows(None, 0, why="this architecture has no experts")
_NO_SHARED = allows(None, 0, why="shared experts are not supported")
ALLOWED = {
    "hidden_act": allows("silu", None, why="the decoder computes SiLU only"),
    "is_causal": allows(True, None, why=_EARLIER_ALONE),
    "use_bidirectional_attention": allows(False, None, why=_EARLIER_ALONE),
    "mlp_bias": allows(False, None, why="the decoder has no bias in its MLP"),
    "n_shared_experts": _NO_SHARED,
    "num_shared_experts": _NO_SHARED,
    "shared_expert_intermediate_size": _NO_SHARED,
}
"""Keys that no family may have with other values, unless it says so itself."""
OF_EXPERTS = {"num_experts": _NO_EXPERTS, "num_local_experts": _NO_EXPERTS}
"""Keys that only a family with experts may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Traits):
    """Everything that the decoder, the weight loader and the KV pool need to know of a model."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    """The longest context that the model is meant for, including its rope scaling."""
    rms_norm_eps: float
    rotary_dim: int
    """Dimensions of a head that are rotated, the first ones. In memory a head is in `rotated_order`."""
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    """Whether the head is the embedding. False where the checkpoint holds another head, whatever config.json says."""
    dtype: DataTypeName
    """The data type in which the checkpoint says it was saved. float32 if it does not say."""
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    quantisation: QuantScheme | None = None
    """How the linear layers are quantised. None: not at all."""
    pooling: Pooling | None = None
    """How an embedding follows from hidden states. None: the model generates."""

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts in place of one MLP, or beside one that all tokens share."""
        return self.mixture is not None and layer in self.mixture.sparse_layers


def load_config(folder: Path) -> ModelConfig:
    """Return the config from config.json and, for the ids of special tokens, generation_config.json.

    Where the weights are in the folder, `tie_word_embeddings` says what they hold. Raises UnsupportedModelError for a
    model this engine cannot run, ValueError for a file it cannot read.
    """
    # Imported here, because that module takes the config from this one.
    from blockyard.worker.model.tied_head import has_own_head

    try:
        config = _load_config(folder)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        # A value of the wrong kind. It is too rare to check each key for it.
        raise ValueError(f"{folder / 'config.json'} has a value of the wrong kind: {error}") from error
    is_in_question = config.tie_word_embeddings and config.pooling is None
    return (
        replace(config, tie_word_embeddings=False)
        if is_in_question and has_own_head(folder, config)
        else config
    )


def _load_config(folder: Path) -> ModelConfig:
    whole = _read_json(folder / "config.json")
    stated = model_files.text_config(whole)
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    pooling = read_pooling(folder)
    architecture = find_architecture(stated.get("architectures") or [], is_bare=pooling is not None)
    family = FAMILIES[architecture]
    given = {**family.defaults, **_defaults_of_text(whole, family, architecture), **stated}
    raw = family.as_llama(given)
    refuse_others(raw, {**ALLOWED, **family.allowed})
    num_heads = _positive(raw, "num_attention_heads")
    num_layers = _positive(raw, "num_hidden_layers", most=MAX_LAYERS)
    trained_context = _positive(raw, "max_position_embeddings")
    hidden_size = _positive(raw, "hidden_size")
    head_dim = _positive(raw, "head_dim", hidden_size // num_heads)
    rotary_dim = read_rotary_dim(raw, head_dim, can_be_less=family.rotates_part)
    rope_scaling = read_rope_scaling(raw, trained_context, rotary_dim)
    max_position_embeddings = longest_context(raw)
    if max_position_embeddings > MAX_SIZE:
        raise UnsupportedModelError(
            f"rope scaling {rope_scaling} in config.json: it reaches more than {MAX_SIZE} positions"
        )
    sizes = Sizes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        head_dim=head_dim,
        longest_context=max_position_embeddings,
    )
    traits = family.traits(given, sizes)
    if traits.mixture is None:
        refuse_others(raw, OF_EXPERTS)
    config = ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_positive(raw, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=_positive(raw, "intermediate_size"),
        vocab_size=_positive(raw, "vocab_size"),
        max_position_embeddings=min(
            max_position_embeddings, traits.most_positions or max_position_embeddings
        ),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rotary_dim=rotary_dim,
        rope_theta=read_rope_theta(raw),
        rope_scaling=rope_scaling,
        # An embedding model has no head of its own, and uses none.
        tie_word_embeddings=pooling is not None or bool(raw.get("tie_word_embeddings", False)),
        dtype=_dtype(raw),
        eos_token_ids=end_tokens(
            generation.get("eos_token_id"),
            raw.get("eos_token_id"),
            tokenizers_end(folder),
            vocab_size=_positive(raw, "vocab_size"),
        ),
        bos_token_id=generation.get("bos_token_id", raw.get("bos_token_id")),
        quantisation=_scheme(raw, family),
        pooling=pooling,
        **_within(traits, max_position_embeddings),
    )
    blocks = None if config.quantisation is None else config.quantisation.block_shape
    is_reordered = config.rotates_adjacent or config.rotary_dim < config.head_dim
    if blocks is not None and is_reordered and blocks[0] % config.head_dim:
        raise UnsupportedModelError(
            f"quantization_config in config.json: blocks of {blocks[0]} outputs have no whole heads of "
            f"{config.head_dim}, whose dimensions a {architecture} reorders"
        )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise UnsupportedModelError(
            f"num_attention_heads={config.num_heads}, num_key_value_heads={config.num_kv_heads} and "
            f"head_dim={config.head_dim}: heads must divide into groups and halves"
        )
    return config


def _defaults_of_text(whole: RawConfig, family: Family, architecture: str) -> RawConfig:
    """Return what a text part may lack. Raises UnsupportedModelError where config.json has a text part that the family
    does not read, or lacks it."""
    text = whole.get(model_files.TEXT_CONFIG) or {}
    if not text and not family.text_models:
        return {}
    found = text.get("model_type", next(iter(family.text_models), None)) if text else None
    if not isinstance(found, str) or found not in family.text_models:
        needed = " or ".join(family.text_models) or "none"
        raise UnsupportedModelError(
            f"model_type={found!r} of text_config in config.json: a {architecture} needs {needed}"
        )
    return family.text_models[found]


def resolve_model(name_or_path: str | Path, patterns: Sequence[str] = HUB_PATTERNS) -> Path:
    """Return the local folder of a model, downloaded if need be (proto/naming/model_files.py). Raises ValueError where
    there is none."""
    return model_files.resolve_model(name_or_path, patterns=patterns, ignored=HUB_IGNORED_PATTERNS)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        model_files.refuse_other_formats(file.parent)
        raise ValueError(f"{file.parent} is no model folder: it has no {file.name}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def _within(traits: Traits, longest_context: int) -> dict[str, Any]:
    """Return the traits as fields. A window no shorter than the longest context hides nothing and is None."""
    windows = tuple(
        None if window is None or window >= longest_context else window for window in traits.layer_windows
    )
    return {field.name: getattr(traits, field.name) for field in fields(traits)} | {"layer_windows": windows}


def _scheme(raw: RawConfig, family: Family) -> QuantScheme | None:
    scheme = read_scheme(raw)
    return None if scheme is None else replace(scheme, renamed=family.renamed)


def _dtype(raw: RawConfig) -> DataTypeName:
    named = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    for known in get_args(DataTypeName):
        if named == known:
            return known  # type: ignore[no-any-return]
    raise UnsupportedModelError(f"dtype={named!r} in config.json is not one of {get_args(DataTypeName)}")


def _positive(raw: RawConfig, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{key}={value!r} in config.json must be a whole number from 1 to {most}")
    return value
