"""Tools of Anthropic's requests, and how they may be called, as those of a chat."""

from typing import Any

from blockyard.proto.limits import MAX_TOOLS
from blockyard.router.errors import InvalidRequest, Unsupported
from blockyard.router.openai.anthropic.checks import closed, required
from blockyard.router.openai.requests.fields import Body, boolean, given, items, mapping, text
from blockyard.router.openai.requests.tools import function_name

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_HINTS = ("cache_control", "eager_input_streaming")
"""Fields of a tool that change no token, and are ignored."""
_NEUTRAL: dict[str, Any] = {"defer_loading": False, "allowed_callers": ["direct"], "input_examples": []}
"""Refused fields of a tool, each with the value that asks for nothing."""


def chat_tools(body: Body) -> dict[str, Any]:
    """Return the fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat. Raises InvalidRequest or
    Unsupported."""
    tools = given(body, "tools", items) or []
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest.of("tools", f"at most {MAX_TOOLS} are allowed")
    listed = [_tool(f"tools.{number}", tool) for number, tool in enumerate(tools)]
    choice = given(body, "tool_choice", mapping)
    if choice is None:
        return {"tools": listed} if listed else {}
    kind = required(choice, "type", text, inside="tool_choice.")
    if not listed:
        if kind == "none":
            return {}
        raise InvalidRequest.of("tool_choice", "may only be specified while providing `tools`")
    return {"tools": listed, **_chosen(choice, kind, {tool["function"]["name"] for tool in listed})}


def _chosen(choice: Body, kind: str, names: set[str]) -> dict[str, Any]:
    extra = {"tool": ("name", "disable_parallel_tool_use"), "none": ()}.get(
        kind, ("disable_parallel_tool_use",)
    )
    closed("tool_choice", choice, ("type", *extra))
    is_alone = choice.get("disable_parallel_tool_use")
    if is_alone is not None and boolean("tool_choice.disable_parallel_tool_use", is_alone):
        chosen: dict[str, Any] = {"parallel_tool_calls": False}
    else:
        chosen = {}
    if kind == "tool":
        name = required(choice, "name", text, inside="tool_choice.")
        if name not in names:
            raise InvalidRequest.of("tool_choice.name", "must be the name of one of `tools`")
        return {**chosen, "tool_choice": {"type": "function", "function": {"name": name}}}
    if kind not in _CHOICES:
        raise InvalidRequest.of("tool_choice.type", "must be auto, any, tool or none")
    return {**chosen, "tool_choice": _CHOICES[kind]}


def _tool(path: str, value: Any) -> dict[str, Any]:
    tool = mapping(path, value)
    if tool.get("type") not in (None, "custom"):
        text(f"{path}.type", tool["type"])
        raise Unsupported.of(
            f"{path}.type", "only custom tools are supported: Anthropic runs the others itself"
        )
    closed(path, tool, ("type", "name", "description", "input_schema", "strict", *_HINTS, *_NEUTRAL))
    for name, neutral in _NEUTRAL.items():
        if tool.get(name) not in (None, neutral):
            raise Unsupported.of(f"{path}.{name}", "is not supported")
    function: dict[str, Any] = {
        "name": function_name(f"{path}.name", required(tool, "name", text, inside=f"{path}."))
    }
    if tool.get("description") is not None:
        function["description"] = text(f"{path}.description", tool["description"])
    function["parameters"] = required(tool, "input_schema", mapping, inside=f"{path}.")
    if tool.get("strict") is not None:
        function["strict"] = boolean(f"{path}.strict", tool["strict"])
    return {"type": "function", "function": function}


TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
        "description": {"type": ["string", "null"]},
        "input_schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
        "cache_control": {"type": ["object", "null"]},
    },
    "required": ["name", "input_schema"],
}
CHOICE_SCHEMA: dict[str, Any] = {
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": {"type": ["string", "null"]},
        "disable_parallel_tool_use": {"type": ["boolean", "null"]},
    },
    "required": ["type"],
    "additionalProperties": False,
}
