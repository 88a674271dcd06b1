"""Grammar: what an output must follow, as a client wrote it, and the limits that are cheap to check.

Pure data. The trial process finds out whether it can be compiled, and at what cost (sandbox.py). The router checks the
same limits. They are checked again because the next step parses with recursion.
"""

import json
from dataclasses import dataclass
from typing import Literal

from blockyard.proto.limits import MAX_REGEX_BYTES, MAX_SCHEMA_DEPTH, MAX_STRUCTURED_BYTES
from blockyard.proto.v1 import inference_pb2
from blockyard.worker.grammar.tool_calls import ToolCalls

GrammarKind = Literal["json_schema", "regex", "json_object", "tool_calls"]


class GrammarError(ValueError):
    """The output cannot follow this grammar. The text is fit for the client: it repeats only names of keywords."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """One grammar. Raises GrammarError for a source that is too large, too deep or not of its kind."""

    kind: GrammarKind
    source: str = ""
    """The JSON schema, the expression, or ToolCalls as JSON. Empty for json_object."""

    def __post_init__(self) -> None:
        if len(self.source) > MAX_STRUCTURED_BYTES or self.num_bytes > MAX_STRUCTURED_BYTES:
            raise GrammarError(f"the grammar has more than {MAX_STRUCTURED_BYTES} bytes")
        match self.kind:
            case "json_schema":
                _check_schema(self.source)
            case "regex":
                if not 0 < self.num_bytes <= MAX_REGEX_BYTES:
                    raise GrammarError(f"the regular expression must have 1 to {MAX_REGEX_BYTES} bytes")
            case "json_object":
                if self.source:
                    raise GrammarError("any JSON object needs no schema")
            case "tool_calls":
                calls = ToolCalls.from_source(self.source)
                for text in (*(tool.schema for tool in calls.tools), calls.text_schema or "true"):
                    _check_schema(text)

    @property
    def num_bytes(self) -> int:
        return len(self.source.encode(errors="surrogatepass"))


def grammar_of(message: inference_pb2.StructuredOutput) -> Grammar | None:
    """Return the grammar of a message, or None where it asks for none. Raises GrammarError."""
    match message.WhichOneof("kind"):
        case "json_schema":
            return Grammar(kind="json_schema", source=message.json_schema)
        case "regex":
            return Grammar(kind="regex", source=message.regex)
        case "json_object":
            return Grammar(kind="json_object") if message.json_object else None
        case "tool_calls":
            if not message.tool_calls.tools:
                raise GrammarError("the grammar of tool calls names no tool")
            return Grammar(kind="tool_calls", source=ToolCalls.of(message.tool_calls).source())
        case _:
            return None


def _check_schema(source: str) -> None:
    try:
        schema = json.loads(source)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None
    except ValueError:
        raise GrammarError("the JSON schema is not valid JSON") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("the JSON schema must be an object, true or false")
    level: list[object] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise GrammarError(f"the JSON schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")


def _children(item: object) -> list[object]:
    match item:
        case dict():
            return list(item.values())
        case list():
            return item
        case _:
            return []
