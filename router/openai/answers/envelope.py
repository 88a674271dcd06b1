"""Envelope of the choices: id, model, time and usage, once for a whole answer or in each chunk.

Most chunks of a stream differ in their text alone, so they are cut from a template.
"""

import json.encoder
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blockyard.router.generation.client_buffer import Delta
from blockyard.router.openai.answers.choices import Choices, Route
from blockyard.router.openai.answers.face import Head
from blockyard.router.openai.answers.tally import Tally
from blockyard.router.openai.http.json_response import encoded
from blockyard.router.openai.http.sse import event
from blockyard.router.openai.requests.wanted import Wanted

PREFIXES: Mapping[Route, str] = {"chat": "chatcmpl-", "completions": "cmpl-"}
WHOLE: Mapping[Route, str] = {"chat": "chat.completion", "completions": "text_completion"}
CHUNK: Mapping[Route, str] = {"chat": "chat.completion.chunk", "completions": "text_completion"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Makes the answer or the chunks of one call around its choices."""

    route: Route
    wanted: Wanted
    head: Head

    def whole(self, choices: list[dict[str, Any]], tally: Tally) -> dict[str, Any]:
        answer = {**self._head(WHOLE), "choices": choices, "usage": tally.usage()}
        return self._with_prompts(answer, tally.prompts)

    def chunk(self, choice: dict[str, Any], delta: Delta, tally: Tally) -> dict[str, Any]:
        answering = self.wanted.answering
        chunk = {**self._head(CHUNK), "choices": [choice]}
        if answering.includes_usage:
            # A stream that sends its usage at the end has null until then.
            chunk["usage"] = tally.usage() if answering.continuous_usage else None
        if delta.prompt_token_ids:
            return self._with_prompts(chunk, {delta.index: delta.prompt_token_ids})
        return chunk

    def usage_chunk(self, tally: Tally) -> dict[str, Any]:
        return {**self._head(CHUNK), "choices": [], "usage": tally.usage()}

    def _with_prompts(self, answer: dict[str, Any], prompts: Mapping[int, Sequence[int]]) -> dict[str, Any]:
        """Return the answer with the prompts' token ids where vLLM has them: once for a chat, else in each choice."""
        if self.route == "chat":
            return answer | ({"prompt_token_ids": list(prompts[0])} if 0 in prompts else {})
        for choice in answer["choices"]:
            if choice["index"] in prompts:
                choice["prompt_token_ids"] = list(prompts[choice["index"]])
        return answer

    def _head(self, objects: Mapping[Route, str]) -> dict[str, Any]:
        return {
            "id": PREFIXES[self.route] + self.head.request_id,
            "object": objects[self.route],
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": None,
        }


@dataclass(slots=True, kw_only=True)
class Chunks:
    """Encodes the chunks of one stream."""

    envelope: Envelope
    choices: Choices
    tally: Tally
    _has_template: bool = field(init=False)
    _seen: set[int] = field(default_factory=set)
    """Outputs whose first chunk, which may have fields of its own, is made."""
    _templates: dict[tuple[int, str], tuple[bytes, bytes, bytes]] = field(default_factory=dict)
    """A chunk's event by index of its output and the field of its text, without this text and its token ids: the bytes
    before, between and after them."""

    def __post_init__(self) -> None:
        wanted = self.envelope.wanted
        shows_logprobs = wanted.requests[0].sampling.HasField("logprobs")
        self._has_template = not (shows_logprobs or wanted.answering.continuous_usage)

    def events(self, delta: Delta) -> bytes:
        """Count a delta, and return its chunk as an event, or nothing if it tells nothing yet."""
        self.tally.add(delta)
        said = self.choices.said(delta, self.tally.prompt_end)
        index = delta.index
        if self._has_template and index in self._seen and len(said) == 1 and delta.finish is None:
            ((name, text),) = said.items()
            if text and isinstance(text, str):
                before, between, after = self._templates.get((index, name)) or self._template(delta, name)
                token_ids = ",".join(map(str, delta.token_ids)).encode() if after else b""
                shown = json.encoder.encode_basestring(text).encode()
                return b"".join((before, shown, between, token_ids, after))
        if self.choices.is_needless(delta, said):
            return b""
        self._seen.add(index)
        return self._made(delta, said)

    def _made(self, delta: Delta, said: dict[str, Any]) -> bytes:
        return event(encoded(self.envelope.chunk(self.choices.piece(delta, said), delta, self.tally)))

    def _template(self, delta: Delta, name: str) -> tuple[bytes, bytes, bytes]:
        mark = secrets.token_hex(8)
        made = self._made(replace(delta, token_ids=[]), {name: mark})
        before, rest = made.split(f'"{mark}"'.encode())
        between, after = rest, b""
        if self.envelope.wanted.shows_token_ids:
            head, _, tail = rest.partition(b'"token_ids":[')
            between, after = head + b'"token_ids":[', tail
        self._templates[delta.index, name] = before, between, after
        return before, between, after
