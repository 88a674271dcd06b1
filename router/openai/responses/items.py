"""Input items of a response: checked, given ids, and translated to the messages of a chat. Pure.

Items of one answer (reasoning, text, calls) become one message, as the model wrote them in one turn. Items of hosted
tools, and content of any kind but text, are refused by name.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blockyard.proto.naming.identifiers import is_id
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.fields import items, mapping, text
from blockyard.router.openai.requests.tools import function_name
from blockyard.router.openai.requests.unsupported import unsupported

Item = dict[str, Any]
ROLES = ("user", "system", "developer", "assistant")
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Prefix of an item's id, by its type."""
_TEXTS = ("input_text", "output_text")
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content", "phase"),
    # OpenAI's Python client adds what it has parsed.
    "function_call": ("call_id", "name", "arguments", "parsed_arguments"),
    "function_call_output": ("call_id", "output", "name"),
    "reasoning": ("summary", "content", "encrypted_content"),
}
"""Fields of an item by its type, besides those of every item."""
_CALLED = ("call_id", "name", "arguments")
_OF_ALL = ("type", "id", "status")


def new_id(kind: str) -> str:
    """Return an id for an item of this type."""
    return f"{PREFIXES[kind]}_{secrets.token_hex(24)}"


def read_input(name: str, value: Any, earlier: Sequence[Item] = ()) -> list[Item]:
    """Return an `input` as items. A text is a message of the user. `earlier` are the items before it.

    Raises InvalidRequest or Unsupported.
    """
    given = [{"role": "user", "content": value}] if isinstance(value, str) else items(name, value)
    called = {item["call_id"] for item in earlier if item["type"] == "function_call"}
    found = []
    for number, item in enumerate(given):
        read = _item(f"{name}[{number}]" if isinstance(value, list) else name, item)
        if read["type"] == "function_call":
            called.add(read["call_id"])
        elif read["type"] == "function_call_output" and read["call_id"] not in called:
            raise InvalidRequest.of(
                f"{name}[{number}].call_id", "must be the call_id of a function_call before it"
            )
        found.append(read)
    return found


def chat_messages(given: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat with these items."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    """The assistant's message that the next item may still belong to."""
    for item in given:
        match item["type"]:
            case "reasoning":
                thought = _joined(item["content"])
                if thought:
                    answer = {"role": "assistant", "content": "", "reasoning_content": thought}
                    messages.append(answer)
            case "message" if item["role"] == "assistant":
                said = _joined(item["content"])
                if answer is not None and "tool_calls" in answer:
                    # The results of the calls come after this text, and must follow the calls' message.
                    answer["content"] = (answer["content"] or "") + said or None
                    continue
                if answer is None or answer["content"]:
                    answer = {"role": "assistant"}
                    messages.append(answer)
                answer["content"] = said
            case "function_call":
                if answer is None:
                    answer = {"role": "assistant", "content": ""}
                    messages.append(answer)
                function = {"name": item["name"], "arguments": item["arguments"]}
                calls = answer.setdefault("tool_calls", [])
                calls.append({"id": item["call_id"], "type": "function", "function": function})
                # A call alone has no content: some chat templates tell "" from null.
                answer["content"] = answer["content"] or None
            case "message":
                answer = None
                messages.append({"role": item["role"], "content": _joined(item["content"])})
            case "function_call_output":
                answer = None
                messages.append(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": _said(item["output"])}
                )
    return messages


def _item(path: str, value: Any) -> Item:
    given = mapping(path, value)
    kind = text(f"{path}.type", given.get("type", "message"))
    if kind not in _KNOWN:
        raise unsupported(f"{path}.type")
    for name in sorted(given.keys() - {*_OF_ALL, *_KNOWN[kind]}):
        # Clients send items back with the fields that they know, most of them empty.
        if given[name] not in (None, [], {}, "", False):
            raise InvalidRequest.of(path, "has unknown fields")
    known = given.get("id")
    item: Item = {
        "id": known if isinstance(known, str) and is_id(known) else new_id(kind),
        "type": kind,
        "status": "completed",
    }
    match kind:
        case "message":
            role = text(f"{path}.role", given.get("role"))
            if role not in ROLES:
                raise InvalidRequest.of(f"{path}.role", f"must be one of {', '.join(ROLES)}")
            shown = "output_text" if role == "assistant" else "input_text"
            item |= {"role": role, "content": _parts(f"{path}.content", given.get("content"), _TEXTS, shown)}
        case "function_call":
            item |= {
                "call_id": text(f"{path}.call_id", given.get("call_id")),
                "name": function_name(f"{path}.name", given.get("name")),
                "arguments": text(f"{path}.arguments", given.get("arguments")),
            }
        case "function_call_output":
            output = given.get("output")
            item |= {
                "call_id": text(f"{path}.call_id", given.get("call_id")),
                "output": _parts(f"{path}.output", output, _TEXTS, "input_text")
                if isinstance(output, list)
                else text(f"{path}.output", output),
            }
        case _:
            thought = given.get("content") or []
            item |= {
                "summary": _parts(f"{path}.summary", given.get("summary") or [], ("summary_text",), ""),
                "content": _parts(f"{path}.content", thought, ("reasoning_text",), ""),
            }
    return item


def _parts(path: str, value: Any, kinds: Sequence[str], shown: str) -> list[dict[str, Any]]:
    """Return content as parts of the type `shown`, or of their own where it is empty."""
    if isinstance(value, str):
        value = [{"type": kinds[0], "text": value}]
    return [
        _part(f"{path}[{number}]", part, kinds, shown)
        for number, part in enumerate(items(path, "" if value is None else value))
    ]


def _part(path: str, value: Any, kinds: Sequence[str], shown: str) -> dict[str, Any]:
    part = mapping(path, value)
    kind = text(f"{path}.type", part.get("type"))
    if kind not in kinds:
        raise unsupported(f"{path}.{kind}") if is_id(kind) else unsupported(f"{path}.type")
    said = {"type": shown or kind, "text": text(f"{path}.text", part.get("text"))}
    return said | ({"annotations": []} if shown == "output_text" else {})


def _joined(parts: Iterable[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


def _said(output: str | list[dict[str, Any]]) -> str:
    return output if isinstance(output, str) else _joined(output)


def _content(*kinds: str) -> dict[str, Any]:
    part = {
        "type": "object",
        "properties": {"type": {"enum": [*kinds]}, "text": text.schema},
        "required": ["type", "text"],
    }
    return {"type": ["string", "array"], "items": part}


def _schema(kind: str, fields: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **fields},
        "required": [*required, *(() if kind == "message" else ("type",))],
    }


ITEM_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _schema("message", {"role": {"enum": [*ROLES]}, "content": _content(*_TEXTS)}, "role", "content"),
        _schema("function_call", dict.fromkeys(_CALLED, text.schema), *_CALLED),
        _schema(
            "function_call_output", {"call_id": text.schema, "output": _content(*_TEXTS)}, "call_id", "output"
        ),
        _schema(
            "reasoning",
            {name: {"type": ["array", "null"]} for name in ("summary", "content")},
        ),
    ]
}
