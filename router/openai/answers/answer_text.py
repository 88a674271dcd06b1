"""Text of one chat output, parsed into the fields of OpenAI's API: content, reasoning and tool calls."""

import secrets
import string
from collections.abc import Iterable
from typing import Any

from blockyard.router.parsing.events import Arguments, CallBegun, Event, Said, Thought
from blockyard.router.parsing.reading import Reading

_LETTERS = string.ascii_letters + string.digits
SHORT_ID_CHARS = 9
"""Length of a call's id for Mistral's chat templates, which refuse any other."""


class AnswerText:
    def __init__(self, reading: Reading, prompt_end: str) -> None:
        self._parser = reading.parser(prompt_end)
        calls = reading.format.tools
        self._has_short_ids = calls is not None and calls.short_ids
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    def add(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the fields that the next text completes. A call has an index, and with its beginning an id and a
        name."""
        events = self._parser.push(text)
        return self._fields([*events, *self._parser.finish()] if is_last else events)

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
        call_id = (
            "".join(secrets.choice(_LETTERS) for _ in range(SHORT_ID_CHARS))
            if self._has_short_ids
            else f"call_{secrets.token_hex(12)}"
        )
        return {
            "index": index,
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
