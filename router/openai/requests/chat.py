"""Chat requests: the body of /v1/chat/completions as a GenerateRequest. tools.py has the tools.

Content of any kind but text is refused by name.
"""

import json
from typing import Any

from blockyard.proto.limits import MAX_TOOLS
from blockyard.proto.naming.identifiers import VARIABLE_PATTERN
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.fields import (
    UINT32,
    Body,
    Fields,
    Kind,
    boolean,
    given,
    integer,
    items,
    json_text,
    mapping,
    refuse_others,
    text,
)
from blockyard.router.openai.requests.sampling import OUTPUT_TOKENS, SHARED, generate_request
from blockyard.router.openai.requests.tools import TOOL_FIELDS, function_name, given_tools
from blockyard.router.openai.requests.unsupported import UNSUPPORTED, refuse_unsupported, unsupported
from blockyard.router.openai.requests.wanted import STREAM_FIELDS, Wanted, answering, field_names
from blockyard.router.parsing.formats import NO_FORMAT, AnswerFormat
from blockyard.router.parsing.reading import Reading
from blockyard.router.request.chats import MAX_MESSAGES, MAX_NAME_CHARS

NAMES = {
    "input": "messages",
    "sampling.max_tokens": "max_completion_tokens",
    "sampling.logprobs": "top_logprobs",
}
ROLES = {"developer": "system"}
"""Roles with another name in the contract."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def chat_wanted(body: Body, answers: AnswerFormat = NO_FORMAT) -> Wanted:
    """Return a body of /v1/chat/completions as a checked request. `answers` is the format of the model's answers.

    Raises InvalidRequest or Unsupported.
    """
    refuse_others(body, FIELDS)
    refuse_unsupported(body, but=("tools", "tool_choice", "reasoning_effort"))
    wanted = answering(body)
    request = generate_request(body)
    _set_max_tokens(request.sampling, body)
    _set_logprobs(request.sampling, body)
    request.chat.CopyFrom(chat_of(body, answers))
    tools = given_tools(body, answers)
    names = field_names(body, NAMES)
    is_structured = request.sampling.HasField("structured_output")
    if tools is not None:
        request.chat.tools = tools.listed
        grammar = tools.grammar(answers, request.sampling.structured_output if is_structured else None)
        if grammar is not None:
            request.sampling.structured_output.tool_calls.CopyFrom(grammar)
            names = {"sampling.structured_output": "tools", **names}
            is_structured = False
    reading = Reading(
        format=answers,
        tools={} if tools is None else tools.schemas,
        # A structure is all of an output, so it leaves no room for reasoning.
        reads_reasoning=not is_structured and answers.reads_reasoning,
    )
    return Wanted(
        requests=(request,),
        answering=wanted,
        names=names,
        reading=reading if reading.tools or reading.reads_reasoning else None,
    )


def chat_of(body: Body, answers: AnswerFormat) -> inference_pb2.Chat:
    """Return the body's messages and template options as a Chat. Raises InvalidRequest or Unsupported."""
    messages = given(body, "messages", CHAT_FIELDS["messages"])
    if messages is None:
        raise InvalidRequest.of("messages", "must be a list with at least one message")
    kwargs = given(body, "chat_template_kwargs", CHAT_FIELDS["chat_template_kwargs"]) or {}
    kwargs = {**_effort(body, answers), **kwargs}
    chat = inference_pb2.Chat(
        messages=messages, template_kwargs=json_text("chat_template_kwargs", kwargs) if kwargs else None
    )
    for name, kind in CHAT_OPTIONS.items():
        value = given(body, name, kind)
        if value is not None:
            setattr(chat, name, value)
    return chat


def _effort(body: Body, answers: AnswerFormat) -> dict[str, Any]:
    """Return the template's variables for `reasoning_effort`. Raises Unsupported if the template takes none."""
    effort = given(body, "reasoning_effort", FIELDS["reasoning_effort"])
    if effort is None:
        return {}
    if "reasoning_effort" in answers.variables:
        return {"reasoning_effort": effort}
    if "enable_thinking" in answers.variables:
        return {"enable_thinking": effort != "none"}
    if effort == "none":
        return {}
    raise unsupported("reasoning_effort")


def _read_effort(name: str, effort: str) -> str:
    if effort not in EFFORTS:
        raise InvalidRequest.of(name, f"must be one of {', '.join(EFFORTS)}")
    return effort


def _set_max_tokens(sampling: inference_pb2.SamplingParams, body: Body) -> None:
    newer = given(body, "max_completion_tokens", FIELDS["max_completion_tokens"])
    if newer is None:
        return
    if sampling.HasField("max_tokens") and sampling.max_tokens != newer:
        raise InvalidRequest.of("max_tokens", "excludes max_completion_tokens")
    sampling.max_tokens = newer


def _set_logprobs(sampling: inference_pb2.SamplingParams, body: Body) -> None:
    num_top = given(body, "top_logprobs", integer(UINT32))
    if given(body, "logprobs", FIELDS["logprobs"]):
        sampling.logprobs = num_top or 0
    elif num_top is not None:
        raise InvalidRequest.of("top_logprobs", "needs logprobs to be true")


def _read_messages(name: str, messages: list[Any]) -> list[inference_pb2.ChatMessage]:
    if not messages:
        raise InvalidRequest.of(name, "must be a list with at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest.of(name, f"at most {MAX_MESSAGES} are allowed")
    read = [_message(f"{name}[{number}]", message) for number, message in enumerate(messages)]
    called: dict[str, str] = {}
    """Names of the functions that the last answer has called, by the call's id."""
    for number, message in enumerate(read):
        if message.role != "tool":
            calls = json.loads(message.tool_calls or "[]")
            called = {call["id"]: call["function"]["name"] for call in calls}
        elif message.tool_call_id in called:
            # Some chat templates need the name, which OpenAI's API leaves out here.
            message.name = message.name or called[message.tool_call_id]
        else:
            raise InvalidRequest.of(
                f"{name}[{number}].tool_call_id",
                "must be the id of a call in the assistant's message before it",
            )
    return read


def _message(path: str, value: Any) -> inference_pb2.ChatMessage:
    message: Body = mapping(path, value)
    role = text(f"{path}.role", message.get("role"))
    for name in sorted(message.keys() - {"role", "content", "name", *_OF_ROLE.get(role, ())}):
        # Audio, for example. Clients may send back an answer with empty values of them.
        if message[name] not in (None, [], {}):
            raise (
                unsupported(f"{path}.{name}")
                if name in _NO_PARTS
                else InvalidRequest.of(path, "has unknown fields")
            )
    if role == "function":
        raise unsupported(f"{path}.role")
    content = message.get("content")
    if isinstance(content, list) and role == "assistant":
        thoughts, content = _told_apart(f"{path}.content", content)
        message = {**message, "reasoning_content": thoughts} if thoughts else message
    if isinstance(content, list):
        content = "".join(_part(f"{path}.content[{number}]", part) for number, part in enumerate(content))
    read = inference_pb2.ChatMessage(
        role=ROLES.get(role, role),
        name=None if message.get("name") is None else text(f"{path}.name", message["name"]),
    )
    if role == "assistant":
        _read_answer(path, message, read)
    if role == "tool":
        read.tool_call_id = text(f"{path}.tool_call_id", message.get("tool_call_id"))
    if content is not None or not read.tool_calls:
        read.content = text(f"{path}.content", content)
    return read


def _told_apart(path: str, parts: list[Any]) -> tuple[str, list[Any]]:
    """Return the reasoning in an answer's parts, as clients of Mistral and Anthropic send it, and the other parts."""
    thoughts, others = "", []
    for number, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") == "thinking":
            inner = part.get("thinking")
            listed = inner if isinstance(inner, list) else [{"type": "text", "text": inner}]
            thoughts += "".join(_part(f"{path}[{number}].thinking", one) for one in listed)
        else:
            others.append(part)
    return thoughts, others


def _read_answer(path: str, message: Body, read: inference_pb2.ChatMessage) -> None:
    """Read what an earlier answer had besides its content: calls and reasoning. Raises InvalidRequest."""
    for name in REASONING_NAMES:
        if message.get(name) is not None:
            read.reasoning_content = text(f"{path}.{name}", message[name])
    calls = items(f"{path}.tool_calls", message.get("tool_calls") or [])
    if len(calls) > MAX_TOOLS:
        raise InvalidRequest.of(f"{path}.tool_calls", f"at most {MAX_TOOLS} are allowed")
    listed = [_call(f"{path}.tool_calls[{number}]", call) for number, call in enumerate(calls)]
    if listed:
        read.tool_calls = json_text(f"{path}.tool_calls", listed)


def _call(path: str, value: Any) -> dict[str, Any]:
    """Return a call of an earlier answer with its known fields alone. Raises InvalidRequest or Unsupported."""
    call = mapping(path, value)
    if call.get("type") == "custom":
        raise unsupported(f"{path}.type")
    if call.get("type", "function") != "function":
        raise InvalidRequest.of(f"{path}.type", "must be function")
    function = mapping(f"{path}.function", call.get("function"))
    return {
        "id": text(f"{path}.id", call.get("id")),
        "type": "function",
        "function": {
            "name": function_name(f"{path}.function.name", function.get("name")),
            "arguments": text(f"{path}.function.arguments", function.get("arguments")),
        },
    }


REASONING_NAMES = ("reasoning_content", "reasoning")
"""Names under which clients send an answer's reasoning back."""
_OF_ROLE = {"assistant": ("tool_calls", *REASONING_NAMES), "tool": ("tool_call_id",)}
"""Further fields of messages by their role."""
_NO_PARTS = frozenset({"tool_calls", "tool_call_id", "function_call", "audio", "refusal", "annotations"})


def _part(path: str, value: Any) -> str:
    part = mapping(path, value)
    kind = text(f"{path}.type", part.get("type"))
    if kind == "text":
        if part.keys() - _PART["properties"].keys() - PART_HINTS:
            raise InvalidRequest.of(path, "has unknown fields")
        return text(f"{path}.text", part.get("text"))
    if kind in ("image_url", "input_audio", "file", "refusal"):
        raise unsupported(f"{path}.{kind}")
    raise InvalidRequest.of(f"{path}.type", "must be text")


PART_HINTS = frozenset({"cache_control"})
"""Fields of a text part that change no token, and are ignored: prefixes are cached without being asked for."""
_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": text.schema},
    "required": ["type", "text"],
}
_CALL = {
    "type": "object",
    "properties": {
        "id": text.schema,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": text.schema, "arguments": text.schema},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "function"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": ["string", "array", "null"], "items": _PART},
        "name": {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_NAME_CHARS},
        "tool_calls": {"type": ["array", "null"], "items": _CALL, "maxItems": MAX_TOOLS},
        "tool_call_id": {"type": ["string", "null"]},
        "reasoning_content": {"type": ["string", "null"]},
    },
    "required": ["role"],
    "anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}],
}
CHAT_OPTIONS: Fields = {"add_generation_prompt": boolean, "continue_final_message": boolean}
"""Fields with the same name in the Chat message."""
CHAT_FIELDS: Fields = {
    "messages": items.then(_read_messages, items=_MESSAGE, minItems=1, maxItems=MAX_MESSAGES),
    "chat_template_kwargs": Kind(
        mapping.check, {**mapping.schema, "propertyNames": {"pattern": VARIABLE_PATTERN}}
    ).said('Variables for the model\'s chat template, such as {"enable_thinking": false}.'),
    **CHAT_OPTIONS,
}
FIELDS: Fields = {
    **CHAT_FIELDS,
    **SHARED,
    "max_completion_tokens": integer(OUTPUT_TOKENS).said("OpenAI's newer name of max_tokens."),
    "logprobs": boolean.said("Log-probabilities of each sampled token. Default false."),
    "top_logprobs": integer((0, 20)).said("With logprobs: also those of this many top tokens."),
    **STREAM_FIELDS,
    **UNSUPPORTED,
    **TOOL_FIELDS,
    "reasoning_effort": text.then(_read_effort, enum=[*EFFORTS, None]).said(
        "How much the model reasons, where its chat template takes this or can turn reasoning off."
    ),
}
