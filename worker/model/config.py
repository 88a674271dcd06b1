"""Model config: reads from a Hugging Face folder's config.json whether and how this engine runs a model.

Owns the refusal of everything that it cannot run exactly. Every key of the file that changes the arithmetic is either
read here, in `rope`, in `layer_windows` or in `mixture`, or named in the error. Does not read weights or tokenizers,
and does not import torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from blockyard.proto.naming import model_files
from blockyard.proto.naming.pooling import POOLING_FILES, Pooling, read_pooling
from blockyard.worker.model.layer_windows import read_layer_windows
from blockyard.worker.model.mixture import Mixture, read_mixture
from blockyard.worker.model.rope import (
    DEFAULT_THETA,
    RopeScaling,
    UnsupportedModelError,
    longest_context,
    read_rope_scaling,
    read_rope_theta,
)

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)

DataTypeName = Literal["float32", "bfloat16", "float16"]

MAX_SIZE = 2**24
"""Upper bound of any size in a config.json, ten times that of any model. Some sizes become lists before weights are
checked."""
HUB_PATTERNS = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja")
# Mistral's repositories hold the same weights a second time in a format of their own.
HUB_IGNORED_PATTERNS = ("consolidated*",)
HUB_CONFIG_PATTERNS = ("config.json", "generation_config.json", *POOLING_FILES)
"""Files that say whether a model can be run, without its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
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
    rope_theta: float
    rope_scaling: RopeScaling | None
    layer_windows: tuple[int | None, ...]
    """Attention window of each layer in tokens, the query itself included. None for no window."""
    attention_bias: bool
    """Whether queries, keys and values have a bias (Qwen2, and models that say so)."""
    attention_out_bias: bool
    """Whether the projection after attention has a bias too (models that say so, never Qwen2)."""
    qk_norm: bool
    """Whether each head's query and key are normalised before the rotation (Qwen3)."""
    tie_word_embeddings: bool
    dtype: DataTypeName
    """The data type in which the checkpoint says it was saved. float32 if it does not say."""
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    mixture: Mixture | None = None
    """The experts of sparse layers. None: every layer has one MLP."""
    pooling: Pooling | None = None
    """How an embedding follows from hidden states. None: the model generates."""

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts in place of one MLP."""
        return self.mixture is not None and layer in self.mixture.sparse_layers


def load_config(folder: Path) -> ModelConfig:
    """Return the config from config.json and, for the ids of special tokens, generation_config.json.

    Raises UnsupportedModelError for a model this engine cannot run, ValueError for a file it cannot read.
    """
    try:
        return _load_config(folder)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        # A value of the wrong kind. It is too rare to check each key for it.
        raise ValueError(f"{folder / 'config.json'} has a value of the wrong kind: {error}") from error


def _load_config(folder: Path) -> ModelConfig:
    raw = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    pooling = read_pooling(folder)
    architecture = _architecture(raw, is_bare=pooling is not None)
    _refuse_unsupported(raw, architecture)
    num_heads = _positive(raw, "num_attention_heads")
    num_layers = _positive(raw, "num_hidden_layers")
    trained_context = _positive(raw, "max_position_embeddings")
    rope_scaling = read_rope_scaling(raw, trained_context)
    max_position_embeddings = longest_context(trained_context, rope_scaling)
    has_bias = bool(raw.get("attention_bias", False))
    hidden_size = _positive(raw, "hidden_size")
    config = ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_positive(raw, "num_key_value_heads", num_heads),
        head_dim=_positive(raw, "head_dim", hidden_size // num_heads),
        intermediate_size=_positive(raw, "intermediate_size"),
        vocab_size=_positive(raw, "vocab_size"),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=read_rope_theta(
            raw, default=1e6 if architecture == "MixtralForCausalLM" else DEFAULT_THETA
        ),
        rope_scaling=rope_scaling,
        layer_windows=read_layer_windows(raw, architecture, num_layers, max_position_embeddings),
        attention_bias=has_bias or architecture == "Qwen2ForCausalLM",
        attention_out_bias=has_bias and architecture != "Qwen2ForCausalLM",
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        # An embedding model has no head of its own, and uses none.
        tie_word_embeddings=pooling is not None or bool(raw.get("tie_word_embeddings", False)),
        dtype=_dtype(raw),
        # An id beyond the logits is never sampled, so it ends nothing.
        eos_token_ids=frozenset(
            token_id
            for token_id in _token_ids(generation.get("eos_token_id", raw.get("eos_token_id")))
            if 0 <= token_id < _positive(raw, "vocab_size")
        ),
        bos_token_id=generation.get("bos_token_id", raw.get("bos_token_id")),
        mixture=read_mixture(raw, architecture, num_layers),
        pooling=pooling,
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise UnsupportedModelError(
            f"num_attention_heads={config.num_heads}, num_key_value_heads={config.num_kv_heads} and "
            f"head_dim={config.head_dim}: heads must divide into groups and halves"
        )
    return config


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


def _architecture(raw: dict[str, Any], *, is_bare: bool) -> str:
    """Return the architecture. With `is_bare` the checkpoint may lack a head, and name the model without it."""
    named = raw.get("architectures") or []
    headed = [
        str(name).removesuffix("Model") + "ForCausalLM" for name in named if str(name).endswith("Model")
    ]
    found = headed or named if is_bare else named
    if len(found) != 1 or found[0] not in ARCHITECTURES:
        raise UnsupportedModelError(f"architectures={named} is not one of {', '.join(ARCHITECTURES)}")
    return str(found[0])


def _refuse_unsupported(raw: dict[str, Any], architecture: str) -> None:
    _refuse_unless(raw, "hidden_act", ("silu", None), "the decoder computes SiLU only")
    _refuse_unless(raw, "quantization_config", (None,), "quantised checkpoints are not supported")
    _refuse_unless(raw, "is_causal", (True, None), "the decoder attends to earlier tokens only")
    _refuse_unless(
        raw, "use_bidirectional_attention", (False, None), "the decoder attends to earlier tokens only"
    )
    _refuse_unless(raw, "mlp_bias", (False, None), "the decoder has no bias in its MLP")
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        _refuse_unless(raw, "attention_bias", (False, None), f"{architecture} has no biases")


def _refuse_unless(raw: dict[str, Any], key: str, allowed: tuple[object, ...], why: str) -> None:
    if raw.get(key) not in allowed:
        raise UnsupportedModelError(f"{key}={raw[key]!r} in config.json: {why}")


def _dtype(raw: dict[str, Any]) -> DataTypeName:
    named = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    for known in get_args(DataTypeName):
        if named == known:
            return known  # type: ignore[no-any-return]
    raise UnsupportedModelError(f"dtype={named!r} in config.json is not one of {get_args(DataTypeName)}")


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise ValueError(f"{key}={value!r} in config.json must be a whole number from 1 to {MAX_SIZE}")
    return value
