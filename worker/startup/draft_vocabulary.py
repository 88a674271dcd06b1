"""Vocabulary of a draft model: whether it has the served model's tokens. Reads config and tokenizer, and no weights.

Models that share a tokenizer may have different vocabulary sizes, because each pads its embedding as its training
needed. Qwen2.5 0.5B has 151,936 rows, and 7B has 152,064. The ids up to the smaller size then mean the same to both.
"""

import json
from pathlib import Path

from blockyard.worker.model.config import ModelConfig
from blockyard.worker.unsupported import UnsupportedModelError


def check_fits(draft: ModelConfig, served: ModelConfig, folder: Path, tokenizer: Path) -> None:
    """Raise ValueError for a draft model that does not have the served model's tokens, or where either one embeds.

    `folder` holds the draft model, and `tokenizer` the served model's tokenizer. Where either has no tokenizer.json,
    the vocabulary sizes must be equal.
    """
    if served.pooling is not None:
        raise ValueError("draft_model is for models that generate: the served model embeds")
    if draft.pooling is not None:
        raise UnsupportedModelError("draft_model must be a model that generates, not one that embeds")
    own, other = _ids_of(folder), _ids_of(tokenizer)
    if own is None or other is None:
        if draft.vocab_size != served.vocab_size:
            missing = folder if own is None else tokenizer
            raise ValueError(
                f"draft_model {folder} has a vocabulary of {draft.vocab_size} tokens, and the served model "
                f"({tokenizer}) one of {served.vocab_size}: whether they have the same tokens is not known, because "
                f"{missing} has no tokenizer.json"
            )
        return
    difference = _difference(own, other, min(draft.vocab_size, served.vocab_size))
    if difference is not None:
        raise ValueError(
            f"draft_model {folder} has another tokenizer than the served model ({tokenizer}): {difference}"
        )


def _ids_of(folder: Path) -> dict[str, int] | None:
    """Return the id of each token of a folder's tokenizer.json. None where it has no such file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        # A unigram model lists tokens with their scores.
        known = vocab if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}
        ids = {token["content"]: token["id"] for token in content.get("added_tokens") or ()} | known
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read") from error
    if not all(isinstance(one, int) for one in ids.values()):
        raise ValueError(f"{file} cannot be read")
    return ids


def _difference(own: dict[str, int], other: dict[str, int], size: int) -> str | None:
    """Return in words the first difference between ids below `size`. Tokens that only one knows are none."""
    tokens = {token_id: token for token, token_id in other.items()}
    for token, token_id in own.items():
        others_id, others_token = other.get(token, token_id), tokens.get(token_id, token)
        if min(token_id, others_id) < size and others_id != token_id:
            return f"token {token!r} is {token_id} in the one and {others_id} in the other"
        if token_id < size and others_token != token:
            return f"id {token_id} is {token!r} in the one and {others_token!r} in the other"
    return None
