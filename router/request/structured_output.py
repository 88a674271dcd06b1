"""Structured output checks: size, shape and depth of a schema or expression, without compiling it.

Does not own compilation. The worker does it, with limits of time and memory (REJECT_REASON_GRAMMAR).
"""

import json
from collections.abc import Iterable
from typing import Any

from blockyard.proto.limits import MAX_REGEX_BYTES, MAX_SCHEMA_DEPTH, MAX_STRUCTURED_BYTES, MAX_TOOLS
from blockyard.proto.v1 import inference_pb2


def structured_problem(message: inference_pb2.StructuredOutput) -> str | None:
    """Return what is wrong with a structured output, without quoting it, or None."""
    kind = message.WhichOneof("kind")
    match kind:
        case "json_schema" | "regex":
            text = message.json_schema if kind == "json_schema" else message.regex
            # Characters first: there are never more of them than bytes, and they cost nothing to count.
            if len(text) > MAX_STRUCTURED_BYTES or len(text.encode()) > MAX_STRUCTURED_BYTES:
                return f"at most {MAX_STRUCTURED_BYTES} bytes are allowed"
            return _schema_problem(text) if kind == "json_schema" else _regex_problem(text)
        case "tool_calls":
            return _tool_calls_problem(message.tool_calls)
        case "json_object":
            return None if message.json_object else "json_object must be true"
        case _:
            return "one of json_schema, regex, json_object and tool_calls is required"


def _tool_calls_problem(grammar: inference_pb2.ToolCallGrammar) -> str | None:
    if not 1 <= len(grammar.tools) <= MAX_TOOLS:
        return f"1 to {MAX_TOOLS} tools are required"
    if grammar.ByteSize() > MAX_STRUCTURED_BYTES:
        return f"at most {MAX_STRUCTURED_BYTES} bytes are allowed"
    schemas = [tool.schema for tool in grammar.tools] + [grammar.text_schema or "true"]
    return next((problem for schema in schemas if (problem := _schema_problem(schema))), None)


def _regex_problem(text: str) -> str | None:
    if not text:
        return "the expression must not be empty"
    return (
        f"the expression must have at most {MAX_REGEX_BYTES} bytes"
        if len(text.encode()) > MAX_REGEX_BYTES
        else None
    )


def _schema_problem(text: str) -> str | None:
    try:
        schema = parse_json(text)
    except RecursionError:
        return f"the schema must not be nested deeper than {MAX_SCHEMA_DEPTH} levels"
    except ValueError:
        return "the schema must be JSON"
    if not isinstance(schema, dict | bool):
        return "the schema must be an object, true or false"
    if is_deeper_than(schema, MAX_SCHEMA_DEPTH):
        return f"the schema must not be nested deeper than {MAX_SCHEMA_DEPTH} levels"
    return None


def parse_json(text: str) -> Any:
    """Parse JSON. Raises RecursionError, and ValueError also for NaN and Infinity, which are not JSON."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def is_deeper_than(value: object, max_depth: int) -> bool:
    """Return True if a JSON value is nested deeper than `max_depth` levels. Go level by level, without recursion."""
    level = [value]
    for _ in range(max_depth + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(item: object) -> Iterable[object]:
    match item:
        case dict():
            return item.values()
        case list():
            return item
        case _:
            return ()
