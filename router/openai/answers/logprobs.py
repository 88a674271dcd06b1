"""Log-probabilities in the two shapes of OpenAI's API. Does not own their values (the engine)."""

import codecs
from collections.abc import Iterable, Sequence
from math import isnan
from typing import Any

from blockyard.proto.v1.inference_pb2 import TokenLogprob, TopLogprob
from blockyard.router.tokenizing.token_texts import TokenTexts

LEAST_LOGPROB = -9999.0
"""OpenAI's value for anything lower: JSON has no infinity."""


def chat_logprobs(tokens: Iterable[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    content = [
        {**_entry(token, texts), "top_logprobs": [_entry(top, texts) for top in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token: TokenLogprob | TopLogprob, texts: TokenTexts) -> dict[str, Any]:
    text, raw = texts.of(token.token_id)
    return {"token": text, "logprob": _finite(token.logprob), "bytes": None if raw is None else list(raw)}


class CompletionLogprobs:
    """Log-probabilities of one output, piece by piece, with the character of the text at which each token begins."""

    def __init__(self, texts: TokenTexts, *, shows_special: bool) -> None:
        self._texts = texts
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the `logprobs` object of the output's next tokens. NaN, as for a prompt's first token, becomes
        null."""
        return {
            "tokens": [self._texts.of(token.token_id)[0] for token in tokens],
            "token_logprobs": [None if isnan(token.logprob) else _finite(token.logprob) for token in tokens],
            "top_logprobs": [None if isnan(token.logprob) else self._top(token) for token in tokens],
            "text_offset": [self._offset(token) for token in tokens],
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """Return the log-probabilities of the top tokens, by text. Of two with the same text, such as parts of
        characters, keep the likelier one."""
        top: dict[str, float] = {}
        for other in token.top:
            top.setdefault(self._texts.of(other.token_id)[0], _finite(other.logprob))
        return top

    def _offset(self, token: TokenLogprob) -> int:
        offset = self._num_chars
        text, raw = self._texts.of(token.token_id)
        if raw is None:
            raw = text.encode() if self._shows_special else b""
        self._num_chars += len(self._decoder.decode(raw))
        return offset


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)
