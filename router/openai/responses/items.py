"""Input items of a response: checked, given ids, and translated to the messages of a chat. Pure.

Items of one answer (reasoning, text, calls) become one message, as the model wrote them in one turn. Items of hosted
tools, and content of any kind but text, are refused by name.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockyard.proto.naming.identifiers import is_id
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.http.errors import BadEncryptedContent, NoSuchItem
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
_REFERENCE = "item_reference"
_OFTEN_LEFT_OUT = ("message", _REFERENCE)
"""Types that an item need not tell."""
_RESPONSE_ID = re.compile("resp_[0-9a-f]{48}")
_ITEM_ID = re.compile(rf"(?:{'|'.join(PREFIXES.values())})_([0-9a-f]{{48}})[0-9a-f]{{4,8}}")


def new_response_id() -> str:
    """Return an id that cannot be guessed: whoever knows it, and belongs to its tenant, may read the response."""
    return f"resp_{secrets.token_hex(24)}"


def is_response_id(known: str) -> bool:
    return _RESPONSE_ID.fullmatch(known) is not None


def item_id(kind: str, response_id: str, number: int) -> str:
    """Return the id of a response's item of this type. It names the response, so that a reference needs one read."""
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}{number:04x}"


def response_of(item_id: str) -> str | None:
    """Return the id of the response for which an item was made, or None if the id is not of our making."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """All that the items of an input may refer to."""

    response_id: str
    """The response that is to be made. Items without an id get one that names it."""
    earlier: Sequence[Item] = ()
    """Items of the previous response, before the input."""
    stored: Mapping[str, Item] = field(default_factory=dict)
    """Items to which the input refers, by id."""
    opened: Callable[[str], str | None] = lambda sealed: None
    """Opens encrypted reasoning. Returns None for what was not sealed for the caller's tenant."""


def references(name: str, value: Any) -> dict[str, str]:
    """Return the ids of stored items to which an `input` refers, each with its path. Raises InvalidRequest."""
    found: dict[str, str] = {}
    for number, item in enumerate(value if isinstance(value, list) else ()):
        if _is_reference(item):
            found.setdefault(*_reference(f"{name}[{number}]", item))
    return found


def read_input(name: str, value: Any, around: Surroundings) -> list[Item]:
    """Return an `input` as items. A text is a message of the user.

    A reference stands for the item of its id. To one of `around.earlier` it adds nothing: the item is there.

    Raises InvalidRequest, Unsupported or NoSuchItem.
    """
    given = [{"role": "user", "content": value}] if isinstance(value, str) else items(name, value)
    there = {item["id"] for item in around.earlier}
    here: set[str] = set()
    called = {item["call_id"] for item in around.earlier if item["type"] == "function_call"}
    found: list[Item] = []
    for number, one in enumerate(given):
        path = f"{name}[{number}]" if isinstance(value, list) else name
        names_call = f"{path}.call_id"
        if _is_reference(one):
            known, names_call = _reference(path, one)
            if known in there:
                continue
            if known in here:
                raise InvalidRequest.of(names_call, "is the id of an item before it")
            if known not in around.stored:
                raise NoSuchItem.of(names_call, "no stored item has this id, or it has expired")
            item = around.stored[known]
        else:
            item = _item(path, one, around, len(around.earlier) + len(found))
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            raise InvalidRequest.of(names_call, "must be the call_id of a function_call before it")
        here.add(item["id"])
        found.append(item)
    return found


def chat_messages(given: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat with these items."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    """The assistant's message that the next item may still belong to."""
    for item in given:
        match item["type"]:
            case "reasoning":
                # A summary is all that some clients send back of the reasoning.
                thought = _joined(item["content"]) or "\n\n".join(part["text"] for part in item["summary"])
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


def _is_reference(value: Any) -> bool:
    """Return whether an item refers to a stored one. As at OpenAI its type may be left out."""
    if not isinstance(value, dict):
        return False
    kind = value.get("type")
    return kind == _REFERENCE or (kind is None and "id" in value and "role" not in value)


def _reference(path: str, value: Mapping[str, Any]) -> tuple[str, str]:
    """Return the id to which a reference refers, and its path. Raises InvalidRequest."""
    _refuse_others(path, value, ())
    return text(f"{path}.id", value.get("id")), f"{path}.id"


def _refuse_others(path: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in given.keys() - {*_OF_ALL, *known}:
        # Clients send items back with the fields that they know, most of them empty.
        if given[name] not in (None, [], {}, "", False):
            raise InvalidRequest.of(path, "has unknown fields")


def _item(path: str, value: Any, around: Surroundings, number: int) -> Item:
    given = mapping(path, value)
    kind = "message" if given.get("type") is None else text(f"{path}.type", given["type"])
    if kind not in _KNOWN:
        raise unsupported(f"{path}.type")
    _refuse_others(path, given, _KNOWN[kind])
    known = given.get("id")
    item: Item = {
        "id": known if isinstance(known, str) and is_id(known) else item_id(kind, around.response_id, number),
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
            if given.get("encrypted_content"):
                item["content"] = [_opened(f"{path}.encrypted_content", given["encrypted_content"], around)]
    return item


def _opened(path: str, value: Any, around: Surroundings) -> dict[str, Any]:
    """Return the reasoning that was encrypted. It is what the model wrote, whatever else the item has."""
    thought = around.opened(text(path, value))
    if thought is None:
        raise BadEncryptedContent.of(path, "is damaged, or was not made by this cluster for this tenant")
    return {"type": "reasoning_text", "text": thought}


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
        "properties": {
            "type": {"enum": [kind, None]} if kind in _OFTEN_LEFT_OUT else {"const": kind},
            **fields,
        },
        "required": [*required, *(() if kind in _OFTEN_LEFT_OUT else ("type",))],
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
            {
                **{name: {"type": ["array", "null"]} for name in ("summary", "content")},
                "encrypted_content": {"type": ["string", "null"]},
            },
        ),
        _schema(_REFERENCE, {"id": text.schema}, "id"),
    ]
}
