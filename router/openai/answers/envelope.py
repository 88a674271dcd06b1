"""Envelope of the choices: id, model, time and usage, once for a whole answer or in each chunk.

Most chunks of a stream differ in their text alone, so they are cut from a template.
"""

import json.encoder
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blockyard.router.generation.client_buffer import Delta, Emit, Run
from blockyard.router.openai.answers.choices import Choices
from blockyard.router.openai.http.json_response import encoded
from blockyard.router.openai.requests.wanted import Wanted

PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-"}
WHOLE = {"chat": "chat.completion", "completions": "text_completion"}
CHUNK = {"chat": "chat.completion.chunk", "completions": "text_completion"}


class Tally:
    """Counts the tokens of one call so far, and keeps the prompts' tokens for a client that wants them."""

    def __init__(self, outputs_a_prompt: int) -> None:
        self._outputs_a_prompt = outputs_a_prompt
        self._counts: dict[int, tuple[int, int]] = {}
        """Number of tokens and of cached tokens of each prompt, by its index in the call."""
        self._completion_tokens = 0
        self.prompt_end = ""
        """Last text of a chat's prompt, for the parser of its answer."""
        self.prompts: dict[int, Sequence[int]] = {}
        """Token ids of the prompt, by index of its output. Empty unless the client wants them."""

    def add(self, delta: Delta) -> None:
        self._counts[delta.index // self._outputs_a_prompt] = delta.prompt_tokens, delta.cached_tokens
        self._completion_tokens += len(delta.token_ids)
        self.prompt_end = self.prompt_end or delta.prompt_end
        if delta.prompt_token_ids:
            self.prompts[delta.index] = delta.prompt_token_ids

    def of(self, run: Run) -> Run:
        """Return `run` with each of its deltas added here."""

        async def counted(emit: Emit) -> None:
            def add(delta: Delta) -> None:
                self.add(delta)
                emit(delta)

            await run(add)

        return counted

    def usage(self) -> dict[str, Any]:
        """Return the usage so far. Each prompt counts once, whatever its number of outputs."""
        prompt_tokens = sum(tokens for tokens, _ in self._counts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._counts.values())},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Makes the answer or the chunks of one call around its choices."""

    wanted: Wanted
    request_id: str
    model: str
    created: int
    """Time of the call in Unix seconds."""

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
        if self.wanted.route == "chat":
            return answer | ({"prompt_token_ids": list(prompts[0])} if 0 in prompts else {})
        for choice in answer["choices"]:
            if choice["index"] in prompts:
                choice["prompt_token_ids"] = list(prompts[choice["index"]])
        return answer

    def _head(self, objects: Mapping[str, str]) -> dict[str, Any]:
        route = self.wanted.route
        return {
            "id": PREFIXES[route] + self.request_id,
            "object": objects[route],
            "created": self.created,
            "model": self.model,
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
    """A chunk by index of its output and the field of its text, without this text and its token ids: the bytes before,
    between and after them."""

    def __post_init__(self) -> None:
        wanted = self.envelope.wanted
        shows_logprobs = wanted.requests[0].sampling.HasField("logprobs")
        self._has_template = not (shows_logprobs or wanted.answering.continuous_usage)

    def encoded(self, delta: Delta) -> bytes:
        """Count a delta, and return its chunk as JSON, or nothing if it tells nothing yet."""
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
        return encoded(self.envelope.chunk(self.choices.piece(delta, said), delta, self.tally))

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
