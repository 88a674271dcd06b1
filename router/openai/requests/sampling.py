"""Sampling fields of both routes, from JSON to SamplingParams, and other fields that any request may have.

OpenAI's names come first, then ours and vLLM's, which its client sends by `extra_body`. Owns types and names. Ranges
are checked as for gRPC.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from blockyard.proto.limits import (
    COUNTS,
    MAX_BAD_WORD_CHARS,
    MAX_LOGIT_BIAS,
    MAX_OUTPUT_TOKENS,
    MAX_PAUSE_SECONDS,
    MAX_PRIORITY,
    MAX_STOP_CHARS,
)
from blockyard.proto.naming.identifiers import MAX_NAME_CHARS, NAME_PATTERN
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.fields import (
    INT32,
    INT64,
    UINT32,
    Body,
    Fields,
    Kind,
    boolean,
    given,
    integer,
    mapping,
    number,
    text,
    texts,
    token_ids,
)
from blockyard.router.openai.requests.structures import STRUCTURES, given_structure

Value = TypeVar("Value")


POSITIVE = (1, UINT32[1])
OUTPUT_TOKENS = (1, MAX_OUTPUT_TOKENS)


def _counted(name: str, kind: Kind[Value]) -> Kind[Value]:
    """Return the kind with a check of the number of elements before any other: a body may have a million."""

    def checked(name: str, value: Any) -> Value:
        if isinstance(value, list | dict) and len(value) > COUNTS[name]:
            raise InvalidRequest.of(name, f"at most {COUNTS[name]} are allowed")
        return kind(name, value)

    bound = "maxProperties" if kind is mapping else "maxItems"
    return Kind(checked, {**kind.schema, bound: COUNTS[name]})


def _bounded(kind: Kind[Value], most_characters: int) -> Kind[Value]:
    """Return the kind of texts with the bounds that request/sampling_checks.py has for each of them."""
    each = {"type": "string", "minLength": 1, "maxLength": most_characters}
    return Kind(kind.check, {**kind.schema, **each, "type": kind.schema["type"], "items": each})


def _read_biases(name: str, value: Mapping[str, Any]) -> dict[int, float]:
    return {_token_id(token_id): number(name, bias) for token_id, bias in value.items()}


def _top_k(name: str, value: Any) -> int:
    return 0 if value == -1 else integer(UINT32)(name, value)


TEXT_CHARS = {"stop": MAX_STOP_CHARS, "bad_words": MAX_BAD_WORD_CHARS}
"""Most characters of each text of a list."""
_NAME = {"type": "string", "maxLength": MAX_NAME_CHARS, "pattern": NAME_PATTERN}
SCALARS: Fields = {
    "temperature": number,
    "top_p": Kind(number.check, {**number.schema, "exclusiveMinimum": 0, "maximum": 1}),
    "presence_penalty": number,
    "frequency_penalty": number,
    "seed": integer(INT64).said("Drawn by the router if absent."),
    "n": integer(POSITIVE),
    "max_tokens": integer(UINT32),
    "top_k": Kind(_top_k, integer((-1, UINT32[1])).schema).said(
        "Keep the k likeliest tokens; 0 and -1 keep all. Default 0."
    ),
    "min_p": number,
    "repetition_penalty": number,
    "min_tokens": integer((0, MAX_OUTPUT_TOKENS)),
    "ignore_eos": boolean,
    "beam_width": integer(POSITIVE),
    "length_penalty": number,
    "skip_special_tokens": boolean,
}
"""Fields with the same name in SamplingParams."""
LISTS: Fields = {
    **{name: _counted(name, _bounded(texts, most)) for name, most in TEXT_CHARS.items()},
    **{name: _counted(name, token_ids) for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids")},
}
"""Repeated fields with the same name in SamplingParams."""
REQUEST_SCALARS: Fields = {
    "model": text.said("Absent: the cluster's model."),
    "priority": Kind(integer(INT32).check, integer((-MAX_PRIORITY, MAX_PRIORITY)).schema),
    "session_id": Kind(text.check, {**_NAME, "minLength": 1}),
    "cache_salt": Kind(text.check, _NAME),
    "public_prefix": boolean,
    "truncate_prompt_tokens": Kind(
        integer(INT32).check, {**integer((-1, INT32[1])).schema, "not": {"const": 0}}
    ),
}
"""Fields with the same name in GenerateRequest and EmbedRequest."""
HINTS: Fields = {
    "expected_pause_seconds": Kind(
        number.check, {**number.schema, "exclusiveMinimum": 0, "maximum": MAX_PAUSE_SECONDS}
    ).said("Seconds from the answer's end until the session is expected to come back. Steers the cache."),
    "prefetch": boolean.said("Compute the prompt's blocks and generate nothing. Default false."),
}
"""Hints of agents, with the same name in GenerateRequest alone."""
LOGIT_BIAS = _counted("logit_bias", mapping).then(
    _read_biases,
    propertyNames={"pattern": "^[0-9]{1,10}$"},
    additionalProperties={"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
)
STOP_SHOWN = boolean.said(
    "Whether a stop string, or the text of a stop token, ends the text that is returned. Default false."
)
RETURN_TOKEN_IDS = boolean.said(
    "Whether the answer has the token ids of prompt and outputs too. Default false."
)
SHARED: Fields = {
    **SCALARS,
    **LISTS,
    **REQUEST_SCALARS,
    **HINTS,
    **STRUCTURES,
    "logit_bias": LOGIT_BIAS,
    "include_stop_str_in_output": STOP_SHOWN,
    "return_token_ids": RETURN_TOKEN_IDS,
}
"""Fields of both routes. Streaming and log-probabilities are read elsewhere."""


def generate_request(body: Body) -> inference_pb2.GenerateRequest:
    """Return a request with the body's shared fields, without prompt and log-probabilities. Raises InvalidRequest."""
    request = inference_pb2.GenerateRequest(sampling=_sampling(body))
    for name, kind in {**REQUEST_SCALARS, **HINTS}.items():
        value = given(body, name, kind)
        if value is not None:
            setattr(request, name, value)
    request.return_prompt_token_ids = bool(given(body, "return_token_ids", RETURN_TOKEN_IDS))
    return request


def num_outputs(request: inference_pb2.GenerateRequest) -> int:
    return request.sampling.n if request.sampling.HasField("n") else 1


def _sampling(body: Body) -> inference_pb2.SamplingParams:
    sampling = inference_pb2.SamplingParams()
    for name, kind in SCALARS.items():
        value = given(body, name, kind)
        if value is not None:
            setattr(sampling, name, value)
    for name, kind in LISTS.items():
        getattr(sampling, name).extend(given(body, name, kind) or ())
    for token_id, bias in (given(body, "logit_bias", LOGIT_BIAS) or {}).items():
        sampling.logit_bias[token_id] = bias
    if given(body, "include_stop_str_in_output", STOP_SHOWN):
        sampling.include_stop_in_output = True
    structure = given_structure(body)
    if structure is not None:
        sampling.structured_output.CopyFrom(structure)
    return sampling


def _token_id(written: str) -> int:
    """Return a key of logit_bias, which JSON spells as a string, as a token id. Raises InvalidRequest."""
    if not (written.isascii() and written.isdigit()) or len(written) > 10 or int(written) > UINT32[1]:
        raise InvalidRequest.of("logit_bias", "each key must be a token id")
    return int(written)
