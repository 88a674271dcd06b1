"""Parser of outputs by the response template that a model's tokenizer has, with transformers' own streaming parser.

transformers tells which region of the template each text is in. The content of a region is judged here, because there
a call that cannot be read would raise and lose its text. A call is passed on as a whole: only its end tells what it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from blockyard.router.parsing.events import Arguments, CallBegun, Event, Said, Thought

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate, ResponseTemplateField

_CALLS = "tool_calls"
_REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
"""Names that templates give to the reasoning."""


class TemplateParser:
    """Parses one output. `tools` are the schemas of the tools that may be called, none if calls are content."""

    def __init__(
        self,
        template: Mapping[str, Any],
        tools: Mapping[str, Mapping[str, Any] | None],
        prompt_end: str,
    ) -> None:
        """`prompt_end` may have the beginning of the answer, which some chat templates write."""
        # transformers is loaded anyway, for the tokenizer, but takes seconds to import.
        from transformers.utils.chat_parsing import ResponseParser

        loaded = _loaded(json.dumps(template))
        self._tools = tools
        self._fields = loaded.fields
        regions = {name: _plain(region) for name, region in loaded.fields.items() if tools or name != _CALLS}
        has_anchor = loaded.start_anchor_re.search(prompt_end) is not None
        self._parser = ResponseParser(
            replace(loaded, fields=regions, defaults={}), prefix=prompt_end if has_anchor else ""
        )
        self._body = ""
        """Text of the region at hand that no event has: all of a call, or whitespace that may be its end."""
        self._has_text = False
        """Whether the region at hand has more than whitespace."""
        self._events(self._parser.initial_events)  # the prompt's part of the answer is not the output's

    def push(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        return self._events(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """Return the events of the text that was held back."""
        return self._events(self._parser.finalize()[1])

    def _events(self, found: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        for event in found:
            field = event["field"]
            match event["type"]:
                case "region_open":
                    self._body, self._has_text = "", False
                case "region_chunk" if field == _CALLS:
                    self._body += event["text"]
                case "region_chunk":
                    if text := self._shown(event["text"]):
                        events.append(Thought(text) if field in _REASONING else Said(text))
                case "region_close" if field == _CALLS:
                    events += self._calls(self._fields[field], event["value"])
                case _:
                    pass
        return events

    def _shown(self, text: str) -> str:
        """Return the next text of a region without the whitespace around all of it."""
        text = self._body + text if self._has_text else text.lstrip()
        shown = text.rstrip()
        self._has_text = self._has_text or bool(shown)
        self._body = text[len(shown) :]
        return shown

    def _calls(self, region: ResponseTemplateField, captures: object) -> list[Event]:
        """Return the calls in the body of a region, or all of it as content if they cannot be read."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        try:
            value = process_field(self._body, region, captures if isinstance(captures, dict) else {})
            return [
                event
                for call in (value if isinstance(value, list) else [value])
                for event in self._call(call)
            ]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return [Said(self._body)] if self._body else []

    def _call(self, call: Any) -> list[Event]:
        """Return one call. Raises LookupError, TypeError or AttributeError for what is no call of a known tool."""
        function = call.get("function", call)
        name, arguments = function["name"], function.get("arguments") or {}
        schema = self._tools[name]
        if isinstance(arguments, dict):
            properties = (schema or {}).get("properties") or {}
            typed = {key: _typed(value, properties.get(key)) for key, value in arguments.items()}
            arguments = json.dumps(typed, ensure_ascii=False)
        return [CallBegun(name), Arguments(str(arguments))]


@lru_cache(maxsize=4)
def _loaded(template: str) -> ResponseTemplate:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(json.loads(template))


def _plain(region: ResponseTemplateField) -> ResponseTemplateField:
    """Return the region with its text as it is, and what its opening captures as its value. Nothing in it can fail."""
    names = () if region.open_re is None else region.open_re.groupindex
    transform = {name: f"{{{name}}}" for name in names} or None
    return replace(
        region,
        content="text",
        content_args={"strip": False},
        transform=transform,
        transform_each=False,
        optional=True,
    )


def _typed(value: Any, schema: Any) -> Any:
    """Return an argument that the format has as text as a value of its schema's type, if it is one."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(value, str) or kind in (None, "string"):
        return value
    try:
        return json.loads(value.lower() if kind == "boolean" else value)
    except (ValueError, RecursionError):
        return value
