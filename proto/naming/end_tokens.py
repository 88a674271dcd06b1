"""End tokens: the ids that end an answer, from all files of a model that name one.

generation_config.json of a chat model often names its base model's token alone, and the tokenizer the one that ends a
turn. So all of them end an answer.
"""

import json
from pathlib import Path
from typing import Any


def end_tokens(*named: object, vocab_size: int) -> frozenset[int]:
    """Return the ids in values of `eos_token_id`: an id, a list of them, or None.

    An id beyond the logits is never sampled, so it ends nothing. Raises ValueError for other values.
    """
    listed = [one for value in named for one in (value if isinstance(value, list | tuple) else [value])]
    ids = [one for one in listed if one is not None]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ValueError(
            "eos_token_id in config.json and generation_config.json must be an id or a list of ids"
        )
    return frozenset(one for one in ids if isinstance(one, int) and 0 <= one < vocab_size)


def tokenizers_end(folder: Path) -> int | None:
    """Return the id of the end token that a folder's tokenizer names, or None. Loads no tokenizer."""
    config = _object(folder / "tokenizer_config.json")
    named = config.get("eos_token") or _object(folder / "special_tokens_map.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if not isinstance(text, str):
        return None
    decoder = config.get("added_tokens_decoder")
    pairs: list[tuple[Any, Any]] = list(decoder.items()) if isinstance(decoder, dict) else []
    if not pairs:
        added = _object(folder / "tokenizer.json").get("added_tokens")
        pairs = (
            [(one.get("id"), one) for one in added if isinstance(one, dict)]
            if isinstance(added, list)
            else []
        )
    for token_id, token in pairs:
        if isinstance(token, dict) and token.get("content") == text and str(token_id).isdecimal():
            return int(token_id)
    return None


def _object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
