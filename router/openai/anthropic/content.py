"""Content of Anthropic's requests: system prompt and messages, made of blocks, as the messages of a chat.

A result of a tool becomes a message of its own. Owns the order that blocks must have. Does not own tools (tools.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blockyard.router.errors import InvalidRequest, Unsupported
from blockyard.router.openai.anthropic.checks import closed, required
from blockyard.router.openai.requests.fields import Kind, boolean, given, items, json_text, mapping, text
from blockyard.router.openai.requests.tools import function_name
from blockyard.router.request.chats import MAX_MESSAGES

Role = Literal["user", "assistant", "system"]
ATTRIBUTION = "x-anthropic-billing-header:"
"""Start of a system block in which Claude Code has its version and a hash. It differs by request, and is left out."""
HINTS = ("type", "cache_control")
"""Fields that each kind of block may have. `cache_control` is ignored: prefixes are cached without being asked for."""
SEPARATOR = "\n"
"""Text between two blocks of text that become one, except in an answer, whose text must stay as it was."""
FAILED = "Error: "
"""Begins the text of a result with `is_error`, for which chat templates have no place."""
_REFUSED = frozenset(
    {"image", "document", "search_result", "container_upload", "server_tool_use", "tool_reference"}
)


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Result:
    path: str
    call_id: str
    text: str


Block = Text | Thinking | Call | Result


@dataclass(frozen=True, slots=True)
class Turn:
    """Neighbouring messages of one role, which count as one message."""

    path: str
    role: Role
    blocks: list[Block]

    @property
    def calls(self) -> list[Call]:
        return [block for block in self.blocks if isinstance(block, Call)]

    @property
    def results(self) -> list[Result]:
        return [block for block in self.blocks if isinstance(block, Result)]

    def text(self, separator: str) -> str:
        return separator.join(block.text for block in self.blocks if isinstance(block, Text))


def chat_messages(system: Any, messages: list[Any]) -> list[dict[str, Any]]:
    """Return a system prompt, or None, and messages as a chat's messages.

    A last message of the assistant is one to be continued. Raises InvalidRequest or Unsupported.
    """
    turns = _turns(messages)
    _check_results(turns)
    chat: list[dict[str, Any]] = []
    if system is not None and (prompt := _system(system)):
        chat.append({"role": "system", "content": prompt})
    for turn in turns:
        if turn.role == "assistant":
            chat.append(_answer(turn))
            continue
        chat += [
            {"role": "tool", "tool_call_id": result.call_id, "content": result.text}
            for result in turn.results
        ]
        if said := turn.text(SEPARATOR):
            chat.append({"role": turn.role, "content": said})
    return chat


def _system(value: Any) -> str:
    if isinstance(value, str):
        return text("system", value)
    blocks = [_text_block(f"system.{number}", block) for number, block in enumerate(items("system", value))]
    return SEPARATOR.join(block for block in blocks if not block.startswith(ATTRIBUTION))


def _turns(messages: list[Any]) -> list[Turn]:
    if not messages:
        raise InvalidRequest.of("messages", "at least one message is required")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest.of("messages", f"at most {MAX_MESSAGES} are allowed")
    turns: list[Turn] = []
    for number, value in enumerate(messages):
        path = f"messages.{number}"
        message = closed(path, value, ("role", "content"))
        role = _role(path, required(message, "role", text, inside=f"{path}."))
        blocks = _blocks(path, role, required(message, "content", _ANY, inside=f"{path}."))
        if turns and turns[-1].role == role:
            turns[-1].blocks.extend(blocks)
        else:
            turns.append(Turn(path, role, blocks))
    _check_last(turns[-1])
    if turns[-1].role == "assistant" and not turns[-1].blocks:
        turns.pop()
    if not turns:
        raise InvalidRequest.of("messages", "needs a message of another role than assistant")
    return turns


def _role(path: str, role: str) -> Role:
    match role:
        case "user" | "assistant" | "system":
            return role
        case _:
            raise InvalidRequest.of(f"{path}.role", "must be user, assistant or system")


def _blocks(path: str, role: Role, content: Any) -> list[Block]:
    if isinstance(content, str):
        blocks: list[Block] = [Text(text(f"{path}.content", content))] if content else []
    else:
        listed = items(f"{path}.content", content)
        blocks = [_block(f"{path}.content.{number}", role, block) for number, block in enumerate(listed)]
    if not blocks and role != "assistant":
        raise InvalidRequest.of(path, f"{role} messages must have non-empty content")
    return blocks


def _block(path: str, role: Role, value: Any) -> Block:
    kind = required(mapping(path, value), "type", text, inside=f"{path}.")
    match kind:
        case "text":
            said = _text_block(path, value)
            if not said and role != "assistant":
                raise InvalidRequest.of(f"{path}.text", "text content blocks must be non-empty")
            return Text(said)
        case "thinking" if role == "assistant":
            block = closed(path, value, (*HINTS, "thinking", "signature"))
            return Thinking(required(block, "thinking", text, inside=f"{path}."))
        case "redacted_thinking" if role == "assistant":
            raise Unsupported.of(path, "redacted_thinking is not supported: only Anthropic can read it")
        case "tool_use" if role == "assistant":
            return _call(path, value)
        case "tool_result" if role == "user":
            return _result(path, value)
    raise _wrong_kind(path, kind, f"must be one that {role} messages may have")


def _wrong_kind(path: str, kind: str, says: str) -> InvalidRequest | Unsupported:
    if kind in _REFUSED or kind.endswith("_tool_result"):
        return Unsupported.of(f"{path}.{kind}", "is not supported")
    return InvalidRequest.of(f"{path}.type", says)


def _text_block(path: str, value: Any) -> str:
    kind = required(mapping(path, value), "type", text, inside=f"{path}.")
    if kind != "text":
        raise _wrong_kind(path, kind, "must be text")
    block = closed(path, value, (*HINTS, "text", "citations"))
    if block.get("citations"):
        raise Unsupported.of(f"{path}.citations", "is not supported")
    return required(block, "text", text, inside=f"{path}.")


def _call(path: str, value: Any) -> Call:
    block = closed(path, value, (*HINTS, "id", "name", "input", "caller"))
    given(block, "caller", mapping)
    return Call(
        required(block, "id", text, inside=f"{path}."),
        function_name(f"{path}.name", required(block, "name", text, inside=f"{path}.")),
        json_text(f"{path}.input", required(block, "input", mapping, inside=f"{path}.")),
    )


def _result(path: str, value: Any) -> Result:
    block = closed(path, value, (*HINTS, "tool_use_id", "content", "is_error"))
    content = block.get("content")
    if isinstance(content, list):
        parts = [_text_block(f"{path}.content.{number}", part) for number, part in enumerate(content)]
        said = SEPARATOR.join(parts)
    else:
        said = "" if content is None else text(f"{path}.content", content)
    failed = block.get("is_error") is not None and boolean(f"{path}.is_error", block["is_error"])
    return Result(path, required(block, "tool_use_id", text, inside=f"{path}."), FAILED * failed + said)


def _check_last(last: Turn) -> None:
    """Check the message that an answer continues. Raises InvalidRequest."""
    if last.role != "assistant" or not last.blocks or last.calls:
        return
    said = last.text("")
    if not said:
        raise InvalidRequest.of("messages", "final assistant content must have text")
    if said != said.rstrip():
        raise InvalidRequest.of("messages", "final assistant content cannot end with trailing whitespace")


def _check_results(turns: Sequence[Turn]) -> None:
    """Check that results follow the calls that they belong to. Raises InvalidRequest."""
    for before, turn in zip((None, *turns), (*turns, None), strict=True):
        waiting = [] if before is None else [call.id for call in before.calls]
        for result in () if turn is None else turn.results:
            if result.call_id not in waiting:
                raise InvalidRequest.of(
                    result.path,
                    "unexpected `tool_use_id` found in `tool_result` blocks. Each `tool_result` block must have a "
                    "corresponding `tool_use` block in the previous message.",
                )
            waiting.remove(result.call_id)
        if before is not None and waiting:
            raise InvalidRequest.of(
                before.path,
                "`tool_use` ids were found without `tool_result` blocks immediately after. Each `tool_use` block must "
                "have a corresponding `tool_result` block in the next message.",
            )
        if turn is not None:
            _check_order(turn)


def _check_order(turn: Turn) -> None:
    has_text = False
    for block in turn.blocks:
        if isinstance(block, Result) and has_text:
            raise InvalidRequest.of(block.path, "`tool_result` blocks must come before text")
        has_text = has_text or isinstance(block, Text)


def _answer(turn: Turn) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": turn.text("")}
    if thought := "".join(block.text for block in turn.blocks if isinstance(block, Thinking)):
        answer["reasoning_content"] = thought
    if turn.calls:
        answer["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    return answer


_ANY: Kind[Any] = Kind(lambda name, value: value, {})
_TEXT = {
    "type": "object",
    "properties": {
        "type": {"const": "text"},
        "text": text.schema,
        "cache_control": {"type": ["object", "null"]},
    },
    "required": ["type", "text"],
}
SYSTEM_SCHEMA: dict[str, Any] = {"type": ["string", "array"], "items": _TEXT}
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {
            "type": ["string", "array"],
            "items": {
                "type": "object",
                "properties": {"type": {"enum": ["text", "thinking", "tool_use", "tool_result"]}},
                "required": ["type"],
            },
        },
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
