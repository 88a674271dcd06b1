"""What a router must know of the model it fronts, read once from its folder: never the weights.

Owns finding the folder and the few facts that validation and sampling need. Does not own the tokenizer's
work.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUTER_FILES = (
    "*.json",
    "*.jinja",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "*.model",
)
"""What is fetched of a hub model: everything but the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model as its files describe it."""

    name: str
    """What clients call it."""
    vocab_size: int
    """Token ids from 0 that both tokenizer and model know."""
    max_position_embeddings: int
    """Its context; workers may serve a shorter one."""
    eos_token_ids: frozenset[int]


def resolve_model(name_or_path: str) -> Path:
    """The local folder of a model: the folder itself, or the router's files of a hub repository.

    Raises ValueError if it is neither.
    """
    folder = Path(name_or_path)
    if (folder / "config.json").is_file():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(ROUTER_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"{name_or_path} is no model folder, nor one that the hub gives") from error


def model_name(name_or_path: str, chosen: str | None) -> str:
    """The chosen name, or the last part of the folder's or the hub's."""
    return chosen or Path(name_or_path).resolve().name


def read_facts(folder: Path, *, name: str, tokenizer_length: int, tokenizer_eos_id: int | None) -> ModelFacts:
    """Raises ValueError for a folder without a readable config.json."""
    config = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id", tokenizer_eos_id))
    return ModelFacts(
        name=name,
        vocab_size=min(_positive(config, "vocab_size"), tokenizer_length),
        max_position_embeddings=_positive(config, "max_position_embeddings"),
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer")
    return value
