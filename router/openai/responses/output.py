"""Output items of a response, built from the parsed output, and the events that tell of them. Pure.

An item is begun, grows and ends; the next one begins after it. Most events of a stream are pieces of text, which are
cut from a template.
"""

import json.encoder
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from blockyard.router.openai.answers.answer_text import ParsedOutput
from blockyard.router.openai.http.json_response import encoded
from blockyard.router.openai.http.sse import event
from blockyard.router.openai.responses.items import Item, item_id
from blockyard.router.parsing.events import Arguments, CallBegun, Event, Said, Thought

Status = Literal["completed", "incomplete"]
_MARK = "\x00"
_OF_SUMMARY = "response.reasoning_summary"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How the output of one response is told."""

    response_id: str
    num_before: int
    """Items before the output: the previous ones and the input."""
    has_summaries: bool = False
    """Whether the reasoning is also told as a summary. Nothing shortens it."""
    sealed: Callable[[str], str] | None = None
    """Encrypts reasoning for the client to keep. None: the client has not asked for it."""


class EventWriter:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._number = 0

    def write(self, name: str, fields: Mapping[str, Any]) -> bytes:
        return event(encoded({"type": name, **fields, "sequence_number": self._next()}), name.encode())

    def template(self, name: str, fields: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """Return the bytes of an event before and after its `delta`. The number is missing at the end."""
        made = event(encoded({"type": name, "delta": _MARK, **fields}), name.encode())
        before, after = made.split(encoded(_MARK))
        return before, after.removesuffix(b"}\n\n") + b',"sequence_number":'

    def cut(self, template: tuple[bytes, bytes], text: str) -> bytes:
        before, after = template
        shown = json.encoder.encode_basestring(text).encode()
        return b"%b%b%b%d}\n\n" % (before, shown, after, self._next())

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


class _OpenItem:
    """The item that grows."""

    def __init__(self, item: Item, index: int, writer: EventWriter, form: OutputForm) -> None:
        self.item = item
        self._texts: list[str] = []
        self._writer = writer
        self._form = form
        self._place = {"item_id": item["id"], "output_index": index}
        self._kind = item["type"]
        match self._kind:
            case "message":
                self._name, self._part = "output_text", "output_text"
            case "reasoning":
                self._name, self._part = "reasoning_text", "reasoning_text"
            case _:
                self._name, self._part = "function_call_arguments", ""
        if self._part:
            self._place["content_index"] = 0
        logprobs: dict[str, Any] = {"logprobs": []} if self._kind == "message" else {}
        self._template = writer.template(f"response.{self._name}.delta", {**self._place, **logprobs})
        self._summary = (
            _Summary(item["id"], index, writer) if form.has_summaries and self._kind == "reasoning" else None
        )

    def begun(self) -> bytes:
        shown = {**self.item, "status": "in_progress"}
        added = self._writer.write("response.output_item.added", {**self._of_item(), "item": shown})
        added += b"" if self._summary is None else self._summary.begun()
        return added + self._of_part("response.content_part.added", "")

    def grown(self, text: str) -> bytes:
        self._texts.append(text)
        told = b"" if self._summary is None else self._summary.grown(text)
        return told + self._writer.cut(self._template, text)

    def ended(self, status: Status) -> bytes:
        text = "".join(self._texts)
        self.item["status"] = status
        done: dict[str, Any] = {**self._place}
        told = b""
        match self._kind:
            case "function_call":
                self.item["arguments"] = done["arguments"] = text
                done["name"] = self.item["name"]
            case "message":
                self.item["content"] = [_text_part(self._part, text)]
                done |= {"text": text, "logprobs": []}
            case _:
                self.item["content"] = [_text_part(self._part, text)]
                done["text"] = text
                if self._summary is not None:
                    self.item["summary"] = [_text_part("summary_text", text)]
                    told = self._summary.ended(text)
                if self._form.sealed is not None:
                    self.item["encrypted_content"] = self._form.sealed(text)
        write = self._writer.write
        return (
            told
            + write(f"response.{self._name}.done", done)
            + self._of_part("response.content_part.done", text)
            + write("response.output_item.done", {**self._of_item(), "item": self.item})
        )

    def _of_item(self) -> dict[str, Any]:
        return {"output_index": self._place["output_index"]}

    def _of_part(self, name: str, text: str) -> bytes:
        if not self._part:
            return b""
        return self._writer.write(name, {**self._place, "part": _text_part(self._part, text)})


class _Summary:
    """Events of the one part of a growing item's summary."""

    def __init__(self, item_id: str, index: int, writer: EventWriter) -> None:
        self._place = {"item_id": item_id, "output_index": index, "summary_index": 0}
        self._writer = writer
        self._template = writer.template(f"{_OF_SUMMARY}_text.delta", self._place)

    def begun(self) -> bytes:
        return self._of_part("added", "")

    def grown(self, text: str) -> bytes:
        return self._writer.cut(self._template, text)

    def ended(self, text: str) -> bytes:
        done = self._writer.write(f"{_OF_SUMMARY}_text.done", {**self._place, "text": text})
        return done + self._of_part("done", text)

    def _of_part(self, what: str, text: str) -> bytes:
        part = _text_part("summary_text", text)
        return self._writer.write(f"{_OF_SUMMARY}_part.{what}", {**self._place, "part": part})


class OutputItems:
    """Items of one response, and the events that tell of them."""

    def __init__(self, output: ParsedOutput, writer: EventWriter, form: OutputForm) -> None:
        self.items: list[Item] = []
        """All items so far. The last one may still grow."""
        self._output = output
        self._writer = writer
        self._form = form
        self._open: _OpenItem | None = None

    def take(self, events: Iterable[Event]) -> bytes:
        """Add parsed events to the items, and return the stream's events that tell of them."""
        told = []
        for parsed in events:
            match parsed:
                case Said(text):
                    told.append(self._grown("message", text))
                case Thought(text):
                    told.append(self._grown("reasoning", text))
                case CallBegun(name):
                    told.append(self._ended("completed"))
                    told.append(
                        self._begun("function_call", call_id=self._output.call_id(), name=name).begun()
                    )
                case Arguments(text):
                    told.append(self._grown("function_call", text))
        return b"".join(told)

    def end(self, status: Status) -> bytes:
        """End the last item. An output without any item is a message without text."""
        told = b"" if self.items else self._begun("message").begun()
        return told + self._ended(status)

    def _grown(self, kind: str, text: str) -> bytes:
        item = self._open
        if item is not None and item.item["type"] == kind:
            return item.grown(text)
        told = self._ended("completed")
        item = self._begun(kind)
        return told + item.begun() + item.grown(text)

    def _begun(self, kind: str, **fields: str) -> _OpenItem:
        index = len(self.items)
        new_id = item_id(kind, self._form.response_id, self._form.num_before + index)
        item: Item = {"id": new_id, "type": kind, "status": "in_progress"}
        match kind:
            case "message":
                item |= {"role": "assistant", "content": []}
            case "reasoning":
                item |= {"summary": [], "content": []}
            case _:
                item |= {**fields, "arguments": ""}
        self._open = _OpenItem(item, index, self._writer, self._form)
        self.items.append(item)
        return self._open

    def _ended(self, status: Status) -> bytes:
        ended, self._open = self._open, None
        return b"" if ended is None else ended.ended(status)


def _text_part(kind: str, text: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **extra}
