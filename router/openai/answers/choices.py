"""Choices of an answer: outputs, whole or in pieces, in the form of either route.

Does not own the JSON around them (envelope.py).
"""

from dataclasses import dataclass
from typing import Any, Literal

from blockyard.proto.v1 import inference_pb2
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.generation.metrics import FINISHES
from blockyard.router.openai.answers.answer_text import AnswerText
from blockyard.router.openai.answers.logprobs import CompletionLogprobs, chat_logprobs
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.parsing.formats import PromptEnd
from blockyard.router.parsing.reading import Reading
from blockyard.router.tokenizing.token_texts import TokenTexts

Route = Literal["chat", "completions"]
Piece = Delta | inference_pb2.Output
"""A part of an output, or all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Optional details of each piece: which of them the client wants."""

    logprobs: bool
    token_ids: bool
    special_tokens: bool

    @property
    def every_token(self) -> bool:
        """Return True if a piece without text may have other details."""
        return self.logprobs or self.token_ids

    def rest(self, piece: Piece, *, has_called: bool = False) -> dict[str, Any]:
        """Return the fields of a choice that both routes have: how the output ended, and its token ids if wanted."""
        return _end(piece, has_called) | ({"token_ids": list(piece.token_ids)} if self.token_ids else {})


class ChatChoices:
    def __init__(self, texts: TokenTexts, shown: Shown, reading: Reading | None) -> None:
        self._texts = texts
        self._shown = shown
        self._reading = reading
        self._outputs: dict[int, AnswerText] = {}
        """Parsed text by index of its output, if the outputs are parsed."""
        self._begun: set[int] = set()

    def whole(self, output: inference_pb2.Output, prompt_end: PromptEnd) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        has_called = False
        if self._reading is not None:
            answer = AnswerText(self._reading, prompt_end)
            said = answer.add(output.text, is_last=True)
            has_called = answer.has_called
            message |= {"content": None if has_called else ""} | said
            for call in said.get("tool_calls", ()):
                del call["index"]
        return {"index": output.index, "message": message, **self._rest(output, has_called)}

    def said(self, delta: Delta, prompt_end: PromptEnd) -> dict[str, Any]:
        """Return what a delta says, by names of fields. `prompt_end` is the prompt's last text."""
        if self._reading is None:
            return {"content": delta.text} if delta.text else {}
        answer = self._outputs.get(delta.index)
        if answer is None:
            answer = self._outputs[delta.index] = AnswerText(self._reading, prompt_end)
        return answer.add(delta.text, is_last=delta.finish is not None)

    def is_needless(self, delta: Delta, said: dict[str, Any]) -> bool:
        """Return True if a chunk would tell nothing, because the parser holds its text back."""
        is_told = said or delta.finish is not None or self._shown.every_token
        return self._reading is not None and not is_told and delta.index in self._begun

    def piece(self, delta: Delta, said: dict[str, Any]) -> dict[str, Any]:
        """Return a delta as a choice of a chunk. The first one of an output has the role."""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            said = {"role": "assistant", **(said or {"content": ""})}
        answer = self._outputs.get(delta.index)
        has_called = answer is not None and answer.has_called
        return {"index": delta.index, "delta": said, **self._rest(delta, has_called)}

    def _rest(self, piece: Piece, has_called: bool) -> dict[str, Any]:
        logprobs = chat_logprobs(piece.logprobs, self._texts) if self._shown.logprobs else None
        return {"logprobs": logprobs, **self._shown.rest(piece, has_called=has_called)}


class CompletionChoices:
    def __init__(self, texts: TokenTexts, shown: Shown) -> None:
        self._texts = texts
        self._shown = shown
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def whole(self, output: inference_pb2.Output, prompt_end: PromptEnd) -> dict[str, Any]:
        return self.piece(output, {"text": output.text})

    def said(self, delta: Delta, prompt_end: PromptEnd) -> dict[str, Any]:
        return {"text": delta.text}

    def is_needless(self, delta: Delta, said: dict[str, Any]) -> bool:
        return False

    def piece(self, piece: Piece, said: dict[str, Any]) -> dict[str, Any]:
        shown = None
        if self._shown.logprobs:
            logprobs = self._logprobs.setdefault(
                piece.index, CompletionLogprobs(self._texts, shows_special=self._shown.special_tokens)
            )
            shown = logprobs.of(piece.logprobs)
        return {"index": piece.index, **said, "logprobs": shown, **self._shown.rest(piece)}


Choices = ChatChoices | CompletionChoices
"""Makes the choices of one call, in the form of its route."""


def choices_of(route: Route, wanted: Wanted, texts: TokenTexts) -> Choices:
    sampling = wanted.requests[0].sampling
    shown = Shown(
        logprobs=sampling.HasField("logprobs"),
        token_ids=wanted.shows_token_ids,
        special_tokens=shows_special(wanted),
    )
    return ChatChoices(texts, shown, wanted.reading) if route == "chat" else CompletionChoices(texts, shown)


def shows_special(wanted: Wanted) -> bool:
    sampling = wanted.requests[0].sampling
    return sampling.HasField("skip_special_tokens") and not sampling.skip_special_tokens


def _end(piece: Piece, has_called: bool) -> dict[str, Any]:
    """Return the fields that say how the output has ended, if it has. `stop_reason` is vLLM's: the stop text or
    token. `worker_id` is ours: the worker that made the end."""
    finish = piece.finish
    if finish is None:
        return {"finish_reason": None}
    reason = FINISHES[finish.reason]
    if has_called and finish.reason == inference_pb2.FINISH_REASON_STOP:
        reason = "tool_calls"
    return {
        "finish_reason": reason,
        "stop_reason": finish.stop_reason if finish.HasField("stop_reason") else None,
        "worker_id": finish.worker_id,
    }
