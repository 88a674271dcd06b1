"""Chat requests: the body of /v1/chat/completions as a GenerateRequest.

Content of any kind but text is refused by name.
"""

from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.fields import (
    UINT32,
    Body,
    Fields,
    boolean,
    given,
    integer,
    items,
    json_text,
    mapping,
    refuse_others,
    text,
)
from blockyard.router.openai.requests.sampling import POSITIVE, SHARED, generate_request
from blockyard.router.openai.requests.unsupported import UNSUPPORTED, refuse_unsupported, unsupported
from blockyard.router.openai.requests.wanted import STREAM_FIELDS, Wanted, answering, field_names
from blockyard.router.request.validation import MAX_MESSAGES, MAX_NAME_CHARS

NAMES = {
    "input": "messages",
    "sampling.max_tokens": "max_completion_tokens",
    "sampling.logprobs": "top_logprobs",
}
ROLES = {"developer": "system"}
"""Roles with another name in the contract."""
NO_ROLES = ("tool", "function")


def chat_wanted(body: Body) -> Wanted:
    """Return a body of /v1/chat/completions as a checked request. Raises InvalidRequest or Unsupported."""
    refuse_others(body, FIELDS)
    refuse_unsupported(body)
    wanted = answering(body)
    request = generate_request(body)
    _set_max_tokens(request.sampling, body)
    _set_logprobs(request.sampling, body)
    request.chat.CopyFrom(chat_of(body))
    return Wanted(route="chat", requests=(request,), answering=wanted, names=field_names(body, NAMES))


def chat_of(body: Body) -> inference_pb2.Chat:
    """Return the body's messages and template options as a Chat. Raises InvalidRequest or Unsupported."""
    messages = given(body, "messages", CHAT_FIELDS["messages"])
    if messages is None:
        raise InvalidRequest.of("messages", "must be a list with at least one message")
    kwargs = given(body, "chat_template_kwargs", CHAT_FIELDS["chat_template_kwargs"])
    chat = inference_pb2.Chat(messages=messages, template_kwargs=kwargs)
    for name, kind in CHAT_OPTIONS.items():
        value = given(body, name, kind)
        if value is not None:
            setattr(chat, name, value)
    return chat


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
    return [_message(f"{name}[{number}]", message) for number, message in enumerate(messages)]


def _message(path: str, value: Any) -> inference_pb2.ChatMessage:
    message = mapping(path, value)
    for name in sorted(message.keys() - {"role", "content", "name"}):
        # Tool calls or audio. Clients may send back an answer with empty values of them.
        if message[name] not in (None, [], {}):
            raise (
                unsupported(f"{path}.{name}")
                if name in _NO_PARTS
                else InvalidRequest.of(path, "has unknown fields")
            )
    role = text(f"{path}.role", message.get("role"))
    if role in NO_ROLES:
        raise unsupported(f"{path}.role")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{path}.content[{number}]", part) for number, part in enumerate(content))
    return inference_pb2.ChatMessage(
        role=ROLES.get(role, role),
        content=text(f"{path}.content", content),
        name=None if message.get("name") is None else text(f"{path}.name", message["name"]),
    )


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
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"type": ["string", "array"], "items": _PART},
        "name": {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_NAME_CHARS},
    },
    "required": ["role", "content"],
}
CHAT_OPTIONS: Fields = {"add_generation_prompt": boolean, "continue_final_message": boolean}
"""Fields with the same name in the Chat message."""
CHAT_FIELDS: Fields = {
    "messages": items.then(_read_messages, items=_MESSAGE, minItems=1, maxItems=MAX_MESSAGES),
    "chat_template_kwargs": mapping.then(json_text).said(
        'Variables for the model\'s chat template, such as {"enable_thinking": false}.'
    ),
    **CHAT_OPTIONS,
}
FIELDS: Fields = {
    **CHAT_FIELDS,
    **SHARED,
    "max_completion_tokens": integer(POSITIVE).said("OpenAI's newer name of max_tokens."),
    "logprobs": boolean.said("Log-probabilities of each sampled token. Default false."),
    "top_logprobs": integer((0, 20)).said("With logprobs: also those of this many top tokens."),
    **STREAM_FIELDS,
    **UNSUPPORTED,
}
