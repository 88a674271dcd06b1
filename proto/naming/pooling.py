"""Pooling: whether a model's folder holds an embedding model, and how its embedding follows from hidden states.

sentence-transformers describes an embedding model in modules.json: a chain of modules, each with a folder for its
settings. Read here are a transformer, then pooling by the last token, then perhaps normalisation. Any other chain is
refused by name. Routers and workers read the same files, so they agree.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES_FILE = "modules.json"
TEXT_FILE = "sentence_bert_config.json"
POOLING_FILES = (MODULES_FILE, TEXT_FILE, "*/config.json")
"""Files that say how a model pools, beside its config.json."""
_LAST_TOKEN = "lasttoken"
_MODE_PREFIX = "pooling_mode_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The embedding is the last token's hidden state, behind the last norm."""

    normalizes: bool
    """Whether it is divided by its length."""


def read_pooling(folder: Path) -> Pooling | None:
    """Return how the model in a folder pools, or None for a model that generates.

    Raises ValueError for a chain of modules that is not supported, or files that cannot be read.
    """
    file = folder / MODULES_FILE
    if not file.is_file():
        return None
    modules = _read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{file} must hold a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"{file} has the modules {', '.join(kinds)}: supported are Transformer and Pooling, then perhaps Normalize"
        )
    if modules[0].get("path"):
        raise ValueError(f"{file}: the transformer must lie in the folder itself")
    _check_text(folder / TEXT_FILE)
    place = str(modules[1].get("path"))
    if place in ("", ".", "..") or Path(place).name != place:
        raise ValueError(f"{file}: the settings of Pooling must lie in a folder of the model's")
    _check_last_token(folder / place / "config.json")
    return Pooling(normalizes=len(kinds) > 2)


def _check_text(file: Path) -> None:
    settings = _read_json(file) if file.is_file() else {}
    if isinstance(settings, dict) and settings.get("do_lower_case"):
        raise ValueError(f"{file}: texts in lower case are not supported")


def _check_last_token(file: Path) -> None:
    config = _read_json(file)
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object")
    # Newer versions write the mode or a list of modes, older ones a flag for each.
    named = config.get("pooling_mode")
    flags = [key for key, value in config.items() if key.startswith(_MODE_PREFIX) and value]
    modes = [flag.removeprefix(_MODE_PREFIX) for flag in flags] if named is None else named
    modes = modes if isinstance(modes, list) else [modes]
    if modes != [_LAST_TOKEN]:
        raise ValueError(f"{file} pools by {modes}: supported is {_LAST_TOKEN!r} alone")


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON") from error
