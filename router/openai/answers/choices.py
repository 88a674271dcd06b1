"""Choices of an answer: outputs, whole or in pieces, in the form of either route.

Does not own the JSON around them (envelope.py).
"""

from dataclasses import dataclass
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.generation.metrics import FINISHES
from blockyard.router.openai.answers.logprobs import CompletionLogprobs, chat_logprobs
from blockyard.router.openai.answers.token_texts import TokenTexts
from blockyard.router.openai.requests.wanted import Wanted

Piece = Delta | inference_pb2.Output
"""A part of an output, or all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Optional details of each piece: which of them the client wants."""

    logprobs: bool
    token_ids: bool
    special_tokens: bool

    def rest(self, piece: Piece) -> dict[str, Any]:
        """Return the fields of a choice that both routes have: how the output ended, and its token ids if wanted."""
        return _end(piece) | ({"token_ids": list(piece.token_ids)} if self.token_ids else {})


class ChatChoices:
    def __init__(self, texts: TokenTexts, shown: Shown) -> None:
        self._texts = texts
        self._shown = shown
        self._begun: set[int] = set()

    def whole(self, output: inference_pb2.Output) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": output.index, "message": message, **self._rest(output)}

    def piece(self, delta: Delta) -> dict[str, Any]:
        """Return a delta as a choice of a chunk. The first one of an output has the role."""
        said = {"content": delta.text} if delta.text or delta.index not in self._begun else {}
        role = {} if delta.index in self._begun else {"role": "assistant"}
        self._begun.add(delta.index)
        return {"index": delta.index, "delta": role | said, **self._rest(delta)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = chat_logprobs(piece.logprobs, self._texts) if self._shown.logprobs else None
        return {"logprobs": logprobs, **self._shown.rest(piece)}


class CompletionChoices:
    def __init__(self, texts: TokenTexts, shown: Shown) -> None:
        self._texts = texts
        self._shown = shown
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def whole(self, output: inference_pb2.Output) -> dict[str, Any]:
        return self.piece(output)

    def piece(self, piece: Piece) -> dict[str, Any]:
        shown = None
        if self._shown.logprobs:
            logprobs = self._logprobs.setdefault(
                piece.index, CompletionLogprobs(self._texts, shows_special=self._shown.special_tokens)
            )
            shown = logprobs.of(piece.logprobs)
        return {"index": piece.index, "text": piece.text, "logprobs": shown, **self._shown.rest(piece)}


Choices = ChatChoices | CompletionChoices
"""Makes the choices of one call, in the form of its route."""


def choices_of(wanted: Wanted, texts: TokenTexts) -> Choices:
    sampling = wanted.requests[0].sampling
    shown = Shown(
        logprobs=sampling.HasField("logprobs"),
        token_ids=wanted.shows_token_ids,
        special_tokens=shows_special(wanted),
    )
    return ChatChoices(texts, shown) if wanted.route == "chat" else CompletionChoices(texts, shown)


def shows_special(wanted: Wanted) -> bool:
    sampling = wanted.requests[0].sampling
    return sampling.HasField("skip_special_tokens") and not sampling.skip_special_tokens


def _end(piece: Piece) -> dict[str, Any]:
    """Return the fields that say why the output has ended, if it has. `stop_reason` is vLLM's: the stop text or
    token."""
    finish = piece.finish
    if finish is None:
        return {"finish_reason": None}
    reason = FINISHES[finish.reason]
    return {
        "finish_reason": reason,
        "stop_reason": finish.stop_reason if finish.HasField("stop_reason") else None,
    }
