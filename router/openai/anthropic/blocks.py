"""Content blocks of Anthropic's answers: text, thinking and tool_use, whole or as the events of a stream.

Both come from the same events of the parsed output, so blocks are the same however the text was cut.
"""

import json
import json.encoder
from collections.abc import Iterable
from typing import Any, Literal

from blockyard.router.openai.answers.answer_text import ParsedOutput
from blockyard.router.openai.http.json_response import encoded
from blockyard.router.openai.http.sse import event
from blockyard.router.parsing.events import Arguments, CallBegun, Event, Said, Thought, merged

SIGNATURE = "unsigned"
"""Signature of each thinking block. Anthropic's proves that its model wrote the block. Here nothing is proven, and what
comes back is not checked. It is not empty, because some clients drop a block without a signature."""

Kind = Literal["text", "thinking", "tool_use"]
_DELTAS: dict[Kind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Types of deltas and the fields of their text, by kind of block."""


def sse(name: str, **fields: Any) -> bytes:
    """Return an event of a stream."""
    return event(encoded({"type": name, **fields}), name.encode())


class Blocks:
    """Blocks of one output."""

    def __init__(self, output: ParsedOutput) -> None:
        self._output = output
        self._index = -1
        self._open: Kind | None = None
        """Kind of the block that has begun and not ended."""
        self._before_text = b""
        """Bytes before the text in this block's events of text, which are most events of a stream."""
        self.has_called = False

    def whole(self, text: str) -> list[dict[str, Any]]:
        """Return the blocks of a whole output."""
        blocks: list[dict[str, Any]] = []
        for one in merged(self._output.push(text, is_last=True)):
            match one:
                case Arguments(arguments):
                    blocks[-1]["input"] = _input(arguments)
                case _:
                    blocks.append(self._begun(one) | _filled(one))
        return blocks

    def streamed(self, text: str, *, is_last: bool) -> bytes:
        """Return the events of a stream for the next text of an output."""
        found = self._output.push(text, is_last=is_last)
        events = b"".join(self._events(merged(found) if len(found) > 1 else found))
        return events + self._end() if is_last else events

    def _events(self, found: Iterable[Event]) -> Iterable[bytes]:
        for one in found:
            kind = _kind(one)
            if kind != self._open or isinstance(one, CallBegun):
                yield self._end()
                self._index, self._open = self._index + 1, kind
                yield self._start(kind, self._begun(one))
            if not isinstance(one, CallBegun):
                yield b"%b%b}}\n\n" % (self._before_text, json.encoder.encode_basestring(one.text).encode())

    def _start(self, kind: Kind, block: dict[str, Any]) -> bytes:
        delta, field = _DELTAS[kind]
        self._before_text = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{"type":"{delta}","{field}":'
        ).encode()
        return sse("content_block_start", index=self._index, content_block=block)

    def _begun(self, first: Event) -> dict[str, Any]:
        """Return the block that an event begins, as empty as at its start."""
        match first:
            case Thought():
                return {"type": "thinking", "thinking": "", "signature": ""}
            case CallBegun(name):
                self.has_called = True
                return {"type": "tool_use", "id": self._output.call_id("toolu_"), "name": name, "input": {}}
            case _:
                return {"type": "text", "text": ""}

    def _end(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        stop = sse("content_block_stop", index=self._index)
        if kind != "thinking":
            return stop
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        return sse("content_block_delta", index=self._index, delta=signed) + stop


def _kind(one: Event) -> Kind:
    match one:
        case Said():
            return "text"
        case Thought():
            return "thinking"
        case CallBegun() | Arguments():
            return "tool_use"


def _filled(one: Event) -> dict[str, Any]:
    match one:
        case Said(text):
            return {"text": text}
        case Thought(text):
            return {"thinking": text, "signature": SIGNATURE}
        case _:
            return {}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object: an empty one for JSON that `max_tokens` has cut, or that has no UTF-8."""
    try:
        value = json.loads(arguments)
        encoded(value)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
