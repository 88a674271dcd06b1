"""What the clients' calls take: keyword arguments in Python's forms, as the fields of a request.

Owns the names of arguments and what each may be in Python. Ranges are the server's to check, but for those that
protobuf itself cannot hold.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from blockyard.proto.v1 import cluster_pb2, inference_pb2
from google.protobuf.message import Message

Messages = Sequence[Mapping[str, str]]
"""A chat: [{"role": "user", "content": "..."}, ...]; a message may have a "name" too."""
EarlyStopping = bool | Literal["never"]
"""When a search with enough finished beams ends: at once (True), once the running ones are unlikely to get better
(False), or only when they cannot ("never"). As in transformers."""

Request = TypeVar("Request", bound=Message)

_SAMPLING_FIELDS = frozenset(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_BESIDE_PROMPT = frozenset(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) - {
    *("prompt", "chat", "prompt_token_ids", "sampling", "lora_name")
}
_SIMILARITY = 0.65
"""Of two names, so that one is taken for a slip of the other. From here on max_completion_tokens is not min_tokens."""
_STRUCTURED_FIELDS = ("json_schema", "regex", "json_object")


_CHAT_FIELDS = {
    "chat_template_kwargs": "template_kwargs",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
}
"""Fields of Chat, by argument."""


class ChatArguments(TypedDict, total=False):
    """The keyword arguments that say how a chat becomes a prompt."""

    chat_template_kwargs: Mapping[str, Any] | str | None
    """Variables for the chat template, as a value or as JSON text."""
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class GenerateArguments(ChatArguments, total=False):
    """The keyword arguments of generate() and stream(). None or absent leaves the server's default."""

    messages: Messages | None
    prompt_token_ids: Sequence[int] | None
    model: str | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_token_ids: Sequence[int] | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    skip_special_tokens: bool | None
    bad_words: str | Sequence[str] | None
    include_stop_in_output: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    n: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: EarlyStopping | None
    json_schema: Mapping[str, Any] | bool | str | None
    """As a value or as JSON text. At most one of this, regex and json_object."""
    regex: str | None
    json_object: bool | None
    request_id: str | None
    cache_salt: str | None
    public_prefix: bool | None
    """Share cached prefixes beyond the caller's tenant."""
    priority: int | None
    session_id: str | None
    policy: str | None
    """Of placement, for this request alone; for admins."""
    truncate_prompt_tokens: int | None
    """Keep the last so many tokens of the prompt; -1: as many as leave room."""
    return_prompt_token_ids: bool | None


class PromptArguments(ChatArguments, total=False):
    """The keyword arguments that name a prompt, of lookup_prefix()."""

    messages: Messages | None
    prompt_token_ids: Sequence[int] | None
    cache_salt: str | None
    public_prefix: bool | None


class PlacementArguments(PromptArguments, total=False):
    """The keyword arguments of explain_placement()."""

    session_id: str | None


def generate_request(prompt: str | None, arguments: GenerateArguments) -> inference_pb2.GenerateRequest:
    """Raises ValueError or TypeError, naming the argument, for what no server could accept."""
    given = _given(arguments, GenerateArguments.__optional_keys__, beside=("prompt", "timeout_seconds"))
    sampling = _sampling(given)
    request = _prompt_request(inference_pb2.GenerateRequest, prompt, given, _BESIDE_PROMPT)
    request.sampling.CopyFrom(sampling)
    return request


def lookup_request(prompt: str | None, arguments: PromptArguments) -> cluster_pb2.LookupPrefixRequest:
    """Raises as generate_request does."""
    given = _given(arguments, PromptArguments.__optional_keys__, beside=("prompt",))
    return _prompt_request(cluster_pb2.LookupPrefixRequest, prompt, given, ("cache_salt", "public_prefix"))


def placement_request(
    prompt: str | None, arguments: PlacementArguments
) -> cluster_pb2.ExplainPlacementRequest:
    """Raises as generate_request does."""
    given = _given(arguments, PlacementArguments.__optional_keys__, beside=("prompt",))
    return _prompt_request(
        cluster_pb2.ExplainPlacementRequest, prompt, given, ("cache_salt", "public_prefix", "session_id")
    )


def tokenize_request(
    prompt: str | None, messages: Messages | None, model: str | None, arguments: ChatArguments
) -> inference_pb2.TokenizeRequest:
    """Raises as generate_request does."""
    chat = _given(arguments, ChatArguments.__optional_keys__, beside=("prompt", "messages", "model"))
    return inference_pb2.TokenizeRequest(model=model, **prompt_fields(prompt, messages, None, chat))


def _given(
    arguments: Mapping[str, object], known: frozenset[str], *, beside: Iterable[str]
) -> dict[str, Any]:
    """The arguments that are not None. Raises TypeError for unknown ones; the call also takes those `beside` them."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if unknown := sorted(given.keys() - known):
        told = ", ".join(name + _nearest(name, [*known, *beside]) for name in unknown)
        raise TypeError(f"unknown arguments: {told}")
    return given


def _nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, sorted(names), n=1, cutoff=_SIMILARITY)
    return f" (did you mean {found[0]}?)" if found else ""


def _prompt_request(
    kind: type[Request], prompt: str | None, given: dict[str, Any], beside: Iterable[str]
) -> Request:
    """With the prompt and the fields that this kind has beside it. Takes them out of `given`."""
    messages, token_ids = given.pop("messages", None), given.pop("prompt_token_ids", None)
    chat = {name: given.pop(name) for name in _CHAT_FIELDS if name in given}
    request = kind(**prompt_fields(prompt, messages, token_ids, chat))
    for name in beside:
        if name in given:
            request.MergeFrom(message_of(kind, name, given.pop(name)))
    assert not given, "an argument that is known and has no field"
    return request


def prompt_fields(
    prompt: str | None,
    messages: Messages | None,
    prompt_token_ids: Sequence[int] | None,
    chat_arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """The request's `input`. Raises ValueError unless exactly one is given."""
    if [prompt, messages, prompt_token_ids].count(None) != 2:
        raise ValueError("give exactly one of prompt, messages and prompt_token_ids")
    if chat_arguments and messages is None:
        raise ValueError(f"{min(chat_arguments)}: is for messages")
    if prompt is not None:
        message_of(inference_pb2.GenerateRequest, "prompt", prompt)
        return {"prompt": prompt}
    if prompt_token_ids is not None:
        tokens = message_of(inference_pb2.TokenIds, "ids", prompt_token_ids, called="prompt_token_ids")
        return {"prompt_token_ids": tokens}
    assert messages is not None
    said = [
        {key: message[key] for key in ("role", "content", "name") if key in message} for message in messages
    ]
    chat = message_of(inference_pb2.Chat, "messages", said)
    for name, value in chat_arguments.items():
        is_value = name == "chat_template_kwargs" and not isinstance(value, str)
        field = message_of(
            inference_pb2.Chat, _CHAT_FIELDS[name], json_text(name, value) if is_value else value, called=name
        )
        chat.MergeFrom(field)
    return {"chat": chat}


def _sampling(given: dict[str, Any]) -> inference_pb2.SamplingParams:
    """Takes the sampling arguments out of `given`."""
    for name in ("stop", "bad_words"):
        if isinstance(given.get(name), str):
            given[name] = [given[name]]
    if "early_stopping" in given:
        given["early_stopping"] = _early_stopping(given["early_stopping"])
    sampling = inference_pb2.SamplingParams()
    structured = {name: given.pop(name) for name in _STRUCTURED_FIELDS if name in given}
    if structured.get("json_object") is False:
        del structured["json_object"]
    if len(structured) > 1:
        raise ValueError(f"give at most one of {', '.join(_STRUCTURED_FIELDS)}")
    for name, value in structured.items():
        is_schema = name == "json_schema" and not isinstance(value, str)
        text = json_text(name, value) if is_schema else value
        sampling.structured_output.CopyFrom(message_of(inference_pb2.StructuredOutput, name, text))
    for name in [name for name in given if name in _SAMPLING_FIELDS - {"structured_output"}]:
        sampling.MergeFrom(message_of(inference_pb2.SamplingParams, name, given.pop(name)))
    return sampling


def json_text(name: str, value: object) -> str:
    """The value of an argument as JSON. Raises ValueError, naming it."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from None


def _early_stopping(value: EarlyStopping) -> inference_pb2.EarlyStopping:
    match value:
        case True:
            return inference_pb2.EARLY_STOPPING_FIRST
        case False:
            return inference_pb2.EARLY_STOPPING_HEURISTIC
        case "never":
            return inference_pb2.EARLY_STOPPING_NEVER
    raise ValueError(f"early_stopping must be True, False or 'never', not {value!r}")


def message_of(kind: Any, field: str, value: Any, *, called: str = "") -> Any:
    """A message with one field. Its errors name the argument: protobuf's own do not say which it was."""
    name = called or field
    try:
        return kind(**{field: value})
    except UnicodeError:
        raise ValueError(f"{name}: must be text that UTF-8 can hold") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except TypeError as error:
        # Of a text protobuf says no more than "bad argument type for built-in operation".
        is_text = isinstance(getattr(kind(), field), str)
        told = f"must be text, not {type(value).__name__}" if is_text else error
        raise TypeError(f"{name}: {told}") from None
