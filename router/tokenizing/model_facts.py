"""Facts about the served model, read once from its folder, never from the weights.

Owns the facts that validation and sampling need. Does not own finding the folder (proto/naming/model_files.py) or the
tokenizer's work.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from blockyard.proto.naming import model_files
from blockyard.proto.naming.context import longest_context
from blockyard.proto.naming.end_tokens import end_tokens
from blockyard.proto.naming.pooling import Pooling, read_pooling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIZES = ("vocab_size", "max_position_embeddings", "hidden_size")
NORMALISER_SHRINK = 3
"""Unicode normal forms shorten a character by at most this factor in bytes."""

GenerationConfig = Literal["auto", "none"]
"""Whether the sampling defaults of a model's generation_config.json apply."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of the sampling parameters that a request does not set. The model's generation_config.json may change
    them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model as its files describe it."""

    names: tuple[str, ...]
    """Names that requests may use. The first is the model's id, which responses have."""
    vocab_size: int
    """Number of token ids that both tokenizer and model know: all ids below it."""
    max_position_embeddings: int
    """The model's context. Workers may serve a shorter one."""
    eos_token_ids: frozenset[int]
    longest_token_bytes: int
    """Upper bound of the bytes of text that one token stands for."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    pooling: Pooling | None = None
    """How an embedding follows from hidden states. None: the model generates."""
    embedding_size: int = 0
    """Numbers in an embedding. 0: the model generates."""

    @property
    def name(self) -> str:
        """Return the model's id."""
        return self.names[0]

    def max_text_bytes(self, num_tokens: int) -> int:
        """Return an upper bound of the bytes of a text of this many tokens."""
        return num_tokens * self.longest_token_bytes


def read_facts(
    folder: Path,
    *,
    names: tuple[str, ...],
    tokenizer: "PreTrainedTokenizerBase",
    generation_config: GenerationConfig = "auto",
) -> ModelFacts:
    """Read the facts from a model's folder.

    `generation_config="none"` ignores the model's sampling defaults. Its end-of-text ids count either way. Raises
    ValueError for a folder without a readable config.json, and for an embedding model that is not supported.
    """
    pooling = read_pooling(folder)
    config = _read_config(folder)
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    return ModelFacts(
        names=names,
        vocab_size=min(_positive(config, "vocab_size"), len(tokenizer)),
        max_position_embeddings=_served_context(config),
        eos_token_ids=end_tokens(
            generation.get("eos_token_id"),
            config.get("eos_token_id"),
            tokenizer.eos_token_id,
            vocab_size=_positive(config, "vocab_size"),
        ),
        longest_token_bytes=longest_token_bytes(tokenizer),
        sampling_defaults=(
            read_sampling_defaults(generation) if generation_config == "auto" else SamplingDefaults()
        ),
        pooling=pooling,
        embedding_size=0 if pooling is None else _positive(config, "hidden_size"),
    )


def read_sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Take the sampling defaults out of a generation_config.json. A value out of range is ignored, with a warning."""
    defaults: dict[str, float] = {}
    for field in fields(SamplingDefaults):
        value = generation.get(field.name)
        if value is None:
            continue
        if _is_default(field.name, value):
            defaults[field.name] = value
        else:
            logger.warning("generation_config.json: %s is out of range and ignored", field.name)
    return SamplingDefaults(**defaults)  # type: ignore[arg-type]


def _is_default(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    match name:
        case "top_k":
            return isinstance(value, int) and 0 <= value < 2**32
        case "top_p":
            return 0 < value <= 1
        case "min_p":
            return 0 <= value <= 1
        case "repetition_penalty":
            return 0.01 <= value <= 100
        case _:
            return 0 <= value <= 100


def longest_token_bytes(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return an upper bound of the bytes of text that one token stands for.

    It counts the bytes of the vocabulary's spelling, in which some bytes, such as a space, are a character of two or
    three bytes.
    """
    longest = max(len(token.encode()) for token in tokenizer.get_vocab())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalises = backend is None or backend.normalizer is not None
    return longest * NORMALISER_SHRINK if normalises else longest


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the text part of config.json, with the defaults of transformers where it lacks sizes."""
    config = model_files.text_config(_read_json(folder / "config.json"))
    if model_files.TEXT_CONFIG not in config or all(key in config for key in SIZES):
        return config
    from transformers import AutoConfig

    return {**AutoConfig.from_pretrained(folder).get_text_config().to_dict(), **config}


def _served_context(config: Mapping[str, Any]) -> int:
    """Return the model's context, or the end of Llama 4's first chunk of attention, where workers end it."""
    longest, chunk = longest_context(config), config.get("attention_chunk_size")
    if config.get("model_type") == "llama4_text" and isinstance(chunk, int):
        return min(longest, chunk)
    return longest


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer")
    return value
