"""Text of one chat output, parsed: its events for any API, and the fields of OpenAI's chats."""

import secrets
import string
from collections.abc import Iterable, Sequence
from typing import Any

from blockyard.router.parsing.events import Arguments, CallBegun, Event, Said, Thought
from blockyard.router.parsing.formats import PromptEnd
from blockyard.router.parsing.reading import Reading

_LETTERS = string.ascii_letters + string.digits
SHORT_ID_CHARS = 9
"""Length of a call's id for Mistral's chat templates, which refuse any other."""


class ParsedOutput:
    """Events of one output, in the order of its text. The text of an output that is not parsed is all said."""

    def __init__(self, reading: Reading | None, prompt_end: PromptEnd) -> None:
        """`prompt_end` is the prompt's last text."""
        self._parser = None if reading is None else reading.parser(prompt_end)
        self._reading = reading

    def push(self, text: str, *, is_last: bool) -> Sequence[Event]:
        if self._parser is None:
            return [Said(text)] if text else []
        events = self._parser.push(text)
        return [*events, *self._parser.finish()] if is_last else events

    def call_id(self, prefix: str = "call_") -> str:
        """Return an id for the next call. The prefix is left out where the model's chat template takes none."""
        tools = None if self._reading is None else self._reading.format.tools
        if tools is not None and tools.short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(SHORT_ID_CHARS))
        return f"{prefix}{secrets.token_hex(12)}"


class AnswerText:
    """Fields of one chat output: content, reasoning and tool calls."""

    def __init__(self, reading: Reading, prompt_end: PromptEnd) -> None:
        self._output = ParsedOutput(reading, prompt_end)
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    def add(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the fields that the next text completes. A call has an index, and with its beginning an id and a
        name."""
        return self._fields(self._output.push(text, is_last=is_last))

    def _fields(self, events: Iterable[Event]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for event in events:
            match event:
                case Said(text):
                    fields["content"] = fields.get("content", "") + text
                case Thought(text):
                    fields["reasoning_content"] = fields.get("reasoning_content", "") + text
                case CallBegun(name):
                    fields.setdefault("tool_calls", []).append(self._begun(name))
                case Arguments(text):
                    calls = fields.setdefault("tool_calls", [])
                    if not calls:
                        calls.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        return fields

    def _begun(self, name: str) -> dict[str, Any]:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return {
            "index": index,
            "id": self._output.call_id(),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
