"""Token texts: a single token's text and bytes, for log-probabilities.

A tokenizer decodes only runs of tokens. Some drop the first token's space, and none shows bytes that are no character
on their own. This file works around both. Does not own the text of an output (proto/text.py).
"""

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from blockyard.proto.text import REPLACEMENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEMBERED_TOKENS = 16_384
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte as sentencepiece spells it."""


class TokenTexts:
    """Maps single tokens to their texts and bytes, for all calls of one model."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {token_id: str(token) for token_id, token in added.items() if token.special}
        self._byte_of = _byte_alphabet()
        self.of = lru_cache(maxsize=REMEMBERED_TOKENS)(self._of)
        """Maps a token id to its text, and to its bytes, or None for a special token, which has no text."""

    def _of(self, token_id: int) -> tuple[str, bytes | None]:
        if token_id in self._special:
            return self._special[token_id], None
        raw = self._bytes(token_id)
        return raw.decode("utf-8", errors="replace"), raw

    def _bytes(self, token_id: int) -> bytes:
        spelt = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if match := _BYTE.fullmatch(spelt):
            return bytes.fromhex(match[1])
        # The second of two equal tokens is not the first of the run, so it keeps its space.
        once, twice = self._decoded([token_id]), self._decoded([token_id, token_id])
        text = twice[len(once) :]
        if REPLACEMENT in text and all(character in self._byte_of for character in spelt):
            return bytes(self._byte_of[character] for character in spelt)
        return text.encode()

    def _decoded(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in byte-level vocabularies (GPT-2).

    A visible character stands for its own byte, and those from U+0100 on stand for the other bytes.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }
