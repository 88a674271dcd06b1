"""Tools of a chat request: their fields, and the grammar that forces or limits calls of them.

Owns names and shapes, in OpenAI's form. Does not own whether a schema can be followed (request/structured_output.py,
the worker).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from blockyard.proto.limits import MAX_SCHEMA_DEPTH, MAX_TOOLS
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest, Unsupported
from blockyard.router.openai.requests.fields import (
    Body,
    Fields,
    Kind,
    boolean,
    given,
    items,
    json_text,
    mapping,
    refuse_others,
    text,
)
from blockyard.router.openai.requests.unsupported import unsupported
from blockyard.router.parsing.formats import AnswerFormat
from blockyard.router.request.structured_output import is_deeper_than

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANY_ARGUMENTS = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    schema: Mapping[str, Any] | None
    """JSON schema of its arguments. None: it takes none."""
    strict: bool
    """Whether its arguments must follow the schema, also where the model itself decides to call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools of one request, and how they may be called."""

    tools: tuple[Tool, ...]
    listed: str
    """JSON text of the tools for the chat template."""
    mode: Literal["none", "auto", "required"] = "auto"
    allowed: tuple[Tool, ...] = field(default=())
    """Tools that may be called."""
    parallel: bool = True
    """Whether one answer may have several calls."""

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any] | None]:
        """Return the schemas of the tools whose calls are read, by name."""
        return {} if self.mode == "none" else {tool.name: tool.schema for tool in self.allowed}

    def grammar(
        self, answers: AnswerFormat, beside: inference_pb2.StructuredOutput | None
    ) -> inference_pb2.ToolCallGrammar | None:
        """Return the grammar that the output must follow, or None if it is free or follows `beside`, the structure of
        the text.

        Raises Unsupported or InvalidRequest.
        """
        if self.mode == "none":
            return None
        is_free = self.mode == "auto" and self.parallel and not any(tool.strict for tool in self.allowed)
        if is_free and beside is None:
            return None
        grammar = answers.grammar(
            {tool.name: json.dumps(self._arguments(tool)) for tool in self.allowed},
            allows_many=self.parallel,
            allows_text=self.mode == "auto",
        )
        if grammar is None:
            field = "tool_choice" if self.mode == "required" else "tools"
            raise Unsupported.of(field, "is not supported here: no grammar is known for this model's calls")
        if beside is not None and self.mode == "auto":
            if not grammar.begin:
                # A grammar cannot tell such a call from JSON before it has gone too far.
                raise Unsupported.of("response_format", "is not supported with this model's calls beside it")
            grammar.text_schema = _text_schema(beside)
        return grammar

    def _arguments(self, tool: Tool) -> Mapping[str, Any]:
        if tool.schema is None:
            return _NO_ARGUMENTS
        if self.mode == "auto" and not tool.strict:
            return _ANY_ARGUMENTS
        return tool.schema if tool.schema.get("type") == "object" else {**tool.schema, "type": "object"}


def given_tools(body: Body, answers: AnswerFormat) -> ToolUse | None:
    """Return the tools of a body, or None if it has none. Raises InvalidRequest or Unsupported."""
    tools = given(body, "tools", TOOL_FIELDS["tools"]) or ()
    parallel = given(body, "parallel_tool_calls", TOOL_FIELDS["parallel_tool_calls"])
    choice = body.get("tool_choice")
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequest.of("tool_choice", "is only allowed when tools are specified")
        return None
    if not answers.reads_tools:
        raise Unsupported.of("tools", "is not supported: the chat template shows no known format of calls")
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest.of("tools", "each must have another name")
    mode, allowed = _choice(choice, frozenset(names))
    is_one = isinstance(choice, dict) and choice.get("type") == "function"
    return ToolUse(
        tools=tools,
        listed=json_text("tools", body["tools"]),
        mode=mode,
        allowed=tuple(tool for tool in tools if tool.name in allowed),
        parallel=parallel is not False and not is_one,
    )


def _read_tools(name: str, tools: list[Any]) -> tuple[Tool, ...]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest.of(name, f"at most {MAX_TOOLS} are allowed")
    if is_deeper_than(tools, MAX_SCHEMA_DEPTH):
        raise InvalidRequest.of(name, f"must not be nested deeper than {MAX_SCHEMA_DEPTH} levels")
    return tuple(_tool(f"{name}[{number}]", tool) for number, tool in enumerate(tools))


def _tool(path: str, value: Any) -> Tool:
    tool = mapping(path, value)
    if tool.get("type") == "custom":
        raise unsupported(f"{path}.type")
    if tool.get("type") != "function":
        raise InvalidRequest.of(f"{path}.type", "must be function")
    refuse_others(tool, ("type", "function"), inside=f"{path}.")
    path = f"{path}.function"
    function = mapping(path, tool.get("function"))
    refuse_others(function, ("name", "description", "parameters", "strict"), inside=f"{path}.")
    name = function_name(f"{path}.name", function.get("name"))
    given(function, "description", Kind(lambda _, said: text(f"{path}.description", said), {}))
    schema = function.get("parameters")
    strict = function.get("strict")
    return Tool(
        name=name,
        schema=None if schema is None else mapping(f"{path}.parameters", schema),
        strict=strict is not None and boolean(f"{path}.strict", strict),
    )


def function_name(path: str, value: Any) -> str:
    name = text(path, value)
    if not _NAME.fullmatch(name):
        raise InvalidRequest.of(path, "must have 1 to 64 characters of A-Z, a-z, 0-9, _ and -")
    return name


def _choice(choice: Any, names: frozenset[str]) -> tuple[Literal["none", "auto", "required"], frozenset[str]]:
    """Return the mode of a `tool_choice`, and the names that it allows. Raises InvalidRequest."""
    match choice:
        case None | "auto":
            return "auto", names
        case "none" | "required":
            return ("none", names) if choice == "none" else ("required", names)
        case {"type": "function"}:
            return "required", frozenset([_chosen("tool_choice", choice, names)])
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
        }:
            allowed = [_chosen("tool_choice.allowed_tools.tools", tool, names) for tool in tools]
            if not allowed:
                raise InvalidRequest.of("tool_choice.allowed_tools.tools", "must not be empty")
            return ("auto", frozenset(allowed)) if mode == "auto" else ("required", frozenset(allowed))
        case _:
            raise InvalidRequest.of(
                "tool_choice", "must be none, auto, required, or an object that names functions of tools"
            )


def _chosen(path: str, choice: Any, names: frozenset[str]) -> str:
    function = mapping(f"{path}.function", mapping(path, choice).get("function"))
    name = text(f"{path}.function.name", function.get("name"))
    if name not in names:
        raise InvalidRequest.of(f"{path}.function.name", "must be the name of one of tools")
    return name


def _text_schema(structure: inference_pb2.StructuredOutput) -> str:
    match structure.WhichOneof("kind"):
        case "json_schema":
            return structure.json_schema
        case "json_object":
            return json.dumps(_ANY_ARGUMENTS)
        case _:
            raise InvalidRequest.of("tools", "excludes a structured output other than JSON")


_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {"type": {"enum": ["function", "allowed_tools"]}},
            "required": ["type"],
        },
    ]
}
TOOL_FIELDS: Fields = {
    "tools": items.then(_read_tools, items=_TOOL, maxItems=MAX_TOOLS).said(
        "Functions that the model may call. With `strict`, their arguments always follow their schema."
    ),
    "tool_choice": Kind(lambda name, value: value, _CHOICE).said(
        "none, auto, required, or a function that must be called: {type: function, function: {name}}. Default auto."
    ),
    "parallel_tool_calls": boolean.said("Whether one answer may have several calls. Default true."),
}
