"""Keyword arguments of the clients' calls, and their translation into the fields of a request.

Owns the names of arguments and their Python types. The server checks ranges. Only values that protobuf cannot hold are
refused here.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from google.protobuf.message import Message

Messages = Sequence[Mapping[str, str]]
"""A chat: [{"role": "user", "content": "..."}, ...]. A message may have a "name" too."""
EarlyStopping = bool | Literal["never"]
"""When a beam search with enough finished beams ends, as in transformers. True: at once. False: once better beams are
unlikely. "never": only once better beams are impossible."""

Request = TypeVar("Request", bound=Message)

_SAMPLING_FIELDS = frozenset(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_BESIDE_PROMPT = frozenset(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) - {
    *("prompt", "chat", "prompt_token_ids", "sampling")
}
_NAMING_FIELDS = ("lora_name", "cache_salt", "public_prefix")
"""Fields beside the prompt that decide the names of its blocks."""
_SIMILARITY = 0.65
"""Least similarity at which a known name is suggested for an unknown one."""
_STRUCTURED_FIELDS = ("json_schema", "regex", "json_object")


_CHAT_FIELDS = {
    "chat_template_kwargs": "template_kwargs",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
}
"""Names of arguments, and the fields of the Chat message that they fill."""


class ChatArguments(TypedDict, total=False):
    """Keyword arguments that control how a chat becomes a prompt."""

    chat_template_kwargs: Mapping[str, Any] | str | None
    """Variables for the chat template, as a value or as JSON text."""
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class GenerateArguments(ChatArguments, total=False):
    """Keyword arguments of generate() and stream(). None or absent means the server's default.

    An argument with a text beside its type is an option of `blockyard generate` too, and the text is its help.
    """

    messages: Messages | None
    prompt_token_ids: Sequence[int] | None
    model: Annotated[str | None, "Model of the request. Default: the cluster's first one."]
    lora_name: Annotated[str | None, "Adapter to use (`blockyard lora list`). Default: the bare model."]
    max_tokens: Annotated[int | None, "Maximum tokens to generate."]
    min_tokens: Annotated[int | None, "Tokens before which no end of sequence and no stop token is sampled."]
    ignore_eos: Annotated[bool | None, "Continue past the end of the sequence."]
    temperature: Annotated[
        float | None,
        "Randomness of sampling. 0 always takes the most likely token. Default: the model's own, else 1.",
    ]
    top_k: Annotated[int | None, "Sample among this many most likely tokens. 0: all."]
    top_p: Annotated[float | None, "Sample among the fewest tokens whose probabilities reach this sum."]
    min_p: Annotated[float | None, "Exclude tokens below this share of the most likely token's probability."]
    presence_penalty: Annotated[float | None, "Subtracted once from the logit of each token in the output."]
    frequency_penalty: Annotated[float | None, "Subtracted from a token's logit for each time in the output."]
    repetition_penalty: Annotated[float | None, "Above 1: tokens of prompt and output become less likely."]
    logit_bias: Annotated[
        Mapping[int, float] | None,
        "Added to the logit of token ID, from -100 to 100. May be given more than once.",
    ]
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        "A token that may be sampled; all others are excluded. May be given more than once.",
    ]
    bad_token_ids: Annotated[
        Sequence[int] | None, "A token that is never sampled. May be given more than once."
    ]
    bad_words: Annotated[
        str | Sequence[str] | None,
        "A word of one token that is never sampled. May be given more than once.",
    ]
    seed: Annotated[int | None, "Seed of sampling. The same seed repeats the output. Default: a random one."]
    stop: Annotated[str | Sequence[str] | None, "A text that ends the output. May be given more than once."]
    stop_token_ids: Annotated[
        Sequence[int] | None, "A token that ends the output. May be given more than once."
    ]
    include_stop_in_output: Annotated[
        bool | None, "Keep the stop string or stop token at the end of the output."
    ]
    skip_special_tokens: Annotated[
        bool | None, "Leave special tokens out of the text, or keep them.  [default: skip]"
    ]
    priority: Annotated[int | None, "Priority from -100 to 100. Lower is served earlier."]
    session_id: Annotated[
        str | None, "Name of a conversation. Its requests prefer the worker that served it before."
    ]
    expected_pause_seconds: Annotated[
        float | None, "Seconds until the session is expected to come back. Steers what the cache keeps."
    ]
    prefetch: Annotated[bool | None, "Compute the prompt for later requests, and generate nothing."]
    n: Annotated[int | None, "Number of outputs."]
    beam_width: Annotated[int | None, "Search with this many beams instead of sampling."]
    length_penalty: Annotated[float | None, "Beam search: above 0 favours longer beams."]
    early_stopping: Annotated[
        EarlyStopping | None,
        "When a search with enough finished beams ends. `first`: at once. `heuristic` (default): once better beams are "
        "unlikely. `never`: only once they are impossible.",
    ]
    logprobs: Annotated[int | None, "Most likely tokens to report with each token. Shown with --output json."]
    prompt_logprobs: Annotated[
        int | None,
        "The same for each token of the prompt, which then reuses no cache. Shown with --output json.",
    ]
    json_schema: Annotated[
        Mapping[str, Any] | bool | str | None, "Force the output to be JSON of this schema."
    ]
    """A schema as a value or as JSON text. At most one of json_schema, regex and json_object."""
    json_object: Annotated[bool | None, "Force the output to be a JSON object of any kind."]
    regex: Annotated[str | None, "Force the output to match this regular expression."]
    truncate_prompt_tokens: Annotated[
        int | None,
        "Keep only this many tokens at the end of the prompt. -1: as many as leave room for --max-tokens.",
    ]
    cache_salt: Annotated[str | None, "Share cached prefixes only with requests of the same salt."]
    public_prefix: Annotated[
        bool | None,
        "Share the prompt's prefixes with all tenants. Without it they stay within this token's tenant.",
    ]
    request_id: Annotated[str | None, "Name of the request, for an abort. Default: a random one."]
    policy: str | None
    """Placement policy of this request alone. For admins."""
    return_prompt_token_ids: bool | None


class EmbedArguments(TypedDict, total=False):
    """Keyword arguments of embed(). None or absent means the server's default."""

    prompt_token_ids: Sequence[int] | None
    model: str | None
    dimensions: int | None
    """Numbers of the embedding: its first ones, at length 1 again. Default: all that the model makes."""
    truncate_prompt_tokens: int | None
    """Keep only this many tokens at the end of the prompt. -1: as many as the context holds."""
    priority: int | None
    session_id: str | None
    cache_salt: str | None
    public_prefix: bool | None
    request_id: str | None
    policy: str | None


class PromptArguments(ChatArguments, total=False):
    """Keyword arguments of pull_prefix(): those that give a prompt."""

    messages: Messages | None
    prompt_token_ids: Sequence[int] | None
    lora_name: str | None
    cache_salt: str | None
    public_prefix: bool | None


class LookupArguments(PromptArguments, total=False):
    """Keyword arguments of lookup_prefix()."""

    model: str | None


class PlacementArguments(LookupArguments, total=False):
    """Keyword arguments of explain_placement()."""

    session_id: str | None


def generate_request(prompt: str | None, arguments: GenerateArguments) -> inference_pb2.GenerateRequest:
    """Build a GenerateRequest from generate()'s arguments. Raises ValueError or TypeError for those that cannot be
    sent."""
    given = _given(arguments, GenerateArguments.__optional_keys__, beside=("prompt", "timeout_seconds"))
    sampling = _sampling(given)
    request = _prompt_request(inference_pb2.GenerateRequest, prompt, given, _BESIDE_PROMPT)
    request.sampling.CopyFrom(sampling)
    return request


def embed_request(prompt: str | None, arguments: EmbedArguments) -> inference_pb2.EmbedRequest:
    """Build an EmbedRequest from embed()'s arguments. Raises as generate_request does."""
    given = _given(arguments, EmbedArguments.__optional_keys__, beside=("prompt", "timeout_seconds"))
    beside = EmbedArguments.__optional_keys__ - {"prompt_token_ids"}
    return _prompt_request(inference_pb2.EmbedRequest, prompt, given, sorted(beside))


def lookup_request(prompt: str | None, arguments: LookupArguments) -> cluster_pb2.LookupPrefixRequest:
    """Build a LookupPrefixRequest from lookup_prefix()'s arguments. Raises as generate_request does."""
    given = _given(arguments, LookupArguments.__optional_keys__, beside=("prompt",))
    return _prompt_request(cluster_pb2.LookupPrefixRequest, prompt, given, (*_NAMING_FIELDS, "model"))


def placement_request(
    prompt: str | None, arguments: PlacementArguments
) -> cluster_pb2.ExplainPlacementRequest:
    """Build an ExplainPlacementRequest from explain_placement()'s arguments. Raises as generate_request does."""
    given = _given(arguments, PlacementArguments.__optional_keys__, beside=("prompt",))
    return _prompt_request(
        cluster_pb2.ExplainPlacementRequest, prompt, given, (*_NAMING_FIELDS, "session_id", "model")
    )


def pull_request(
    worker_id: str, prompt: str | None, source_id: str | None, arguments: PromptArguments
) -> admin_pb2.PullPrefixRequest:
    """Build a PullPrefixRequest from pull_prefix()'s arguments. Raises as generate_request does."""
    given = _given(arguments, PromptArguments.__optional_keys__, beside=("prompt",))
    request = _prompt_request(admin_pb2.PullPrefixRequest, prompt, given, _NAMING_FIELDS)
    request.MergeFrom(message_of(admin_pb2.PullPrefixRequest, "worker_id", worker_id))
    if source_id is not None:
        request.MergeFrom(message_of(admin_pb2.PullPrefixRequest, "source_id", source_id))
    return request


def tokenize_request(
    prompt: str | None, messages: Messages | None, model: str | None, arguments: ChatArguments
) -> inference_pb2.TokenizeRequest:
    """Build a TokenizeRequest from tokenize()'s arguments. Raises as generate_request does."""
    chat = _given(arguments, ChatArguments.__optional_keys__, beside=("prompt", "messages", "model"))
    return inference_pb2.TokenizeRequest(model=model, **prompt_fields(prompt, messages, None, chat))


def _given(
    arguments: Mapping[str, object], known: frozenset[str], *, beside: Iterable[str]
) -> dict[str, Any]:
    """Return the arguments that are not None. Raises TypeError for unknown ones, and suggests a similar name.

    `beside` are further arguments of the call, which may be suggested too.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if unknown := sorted(given.keys() - known):
        listed = ", ".join(name + _nearest(name, [*known, *beside]) for name in unknown)
        raise TypeError(f"unknown arguments: {listed}")
    return given


def _nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, sorted(names), n=1, cutoff=_SIMILARITY)
    return f" (did you mean {found[0]}?)" if found else ""


def _prompt_request(
    kind: type[Request], prompt: str | None, given: dict[str, Any], beside: Iterable[str]
) -> Request:
    """Build a request of this kind from the prompt and the other fields, named in `beside`. Take all out of `given`."""
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
    """Return the one `input` field of a request, by name. Raises ValueError unless exactly one kind of prompt is
    given."""
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
    """Take the sampling arguments out of `given`, and return them as a message. Raises ValueError or TypeError."""
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
    """Return an argument's value as JSON. Raises ValueError, which names the argument."""
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
    """Build a message of this kind with one field. Raises ValueError or TypeError, which names the argument
    (`called`)."""
    name = called or field
    try:
        return kind(**{field: value})
    except UnicodeError:
        raise ValueError(f"{name}: must be text that UTF-8 can hold") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except TypeError as error:
        # For a text, protobuf says only "bad argument type for built-in operation".
        is_text = isinstance(getattr(kind(), field), str)
        reason = f"must be text, not {type(value).__name__}" if is_text else error
        raise TypeError(f"{name}: {reason}") from None
