"""Outputs, whole or in pieces, as the choices of either route. Does not own what stands round them (answers.py)."""

from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.metrics import FINISHES
from blockyard.router.openai.logprobs import CompletionLogprobs, chat_logprobs
from blockyard.router.openai.token_texts import TokenTexts
from blockyard.router.openai.wanted import Route
from blockyard.router.output import Delta

Piece = Delta | inference_pb2.Output
"""A part of an output, or all of it."""


class ChatChoices:
    def __init__(self, texts: TokenTexts, *, shows_logprobs: bool) -> None:
        self._texts = texts
        self._shows_logprobs = shows_logprobs
        self._begun: set[int] = set()

    def whole(self, output: inference_pb2.Output) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": output.index, "message": message, **self._rest(output)}

    def piece(self, delta: Delta) -> dict[str, Any]:
        """The role comes with an output's first one."""
        said = {"content": delta.text} if delta.text or delta.index not in self._begun else {}
        role = {} if delta.index in self._begun else {"role": "assistant"}
        self._begun.add(delta.index)
        return {"index": delta.index, "delta": role | said, **self._rest(delta)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = chat_logprobs(piece.logprobs, self._texts) if self._shows_logprobs else None
        return {"logprobs": logprobs, **_end(piece)}


class CompletionChoices:
    def __init__(self, texts: TokenTexts, *, shows_logprobs: bool) -> None:
        self._texts = texts
        self._shows_logprobs = shows_logprobs
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def whole(self, output: inference_pb2.Output) -> dict[str, Any]:
        return self.piece(output)

    def piece(self, piece: Piece) -> dict[str, Any]:
        shown = None
        if self._shows_logprobs:
            logprobs = self._logprobs.setdefault(piece.index, CompletionLogprobs(self._texts))
            shown = logprobs.of(piece.logprobs)
        return {"index": piece.index, "text": piece.text, "logprobs": shown, **_end(piece)}


Choices = ChatChoices | CompletionChoices
"""Of one call."""


def choices_of(route: Route, texts: TokenTexts, *, shows_logprobs: bool) -> Choices:
    make = ChatChoices if route == "chat" else CompletionChoices
    return make(texts, shows_logprobs=shows_logprobs)


def _end(piece: Piece) -> dict[str, Any]:
    """Why the output has ended, if it has. `stop_reason` is vLLM's: the stop text or token."""
    finish = piece.finish
    if finish is None:
        return {"finish_reason": None}
    reason = FINISHES[finish.reason]
    return {
        "finish_reason": reason,
        "stop_reason": finish.stop_reason if finish.HasField("stop_reason") else None,
    }
