"""Sampling parameters of both routes, from JSON into SamplingParams, and what else any request may say.

OpenAI's names first, then ours and vLLM's, which its client sends by `extra_body`. Owns types and names; ranges are
checked where gRPC's are.
"""

from collections.abc import Mapping
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai import fields
from blockyard.router.openai.fields import (
    INT32,
    INT64,
    UINT32,
    Body,
    Kind,
    boolean,
    given,
    integer,
    number,
    text,
)
from blockyard.router.openai.structures import STRUCTURES, given_structure
from blockyard.router.sampling_checks import COUNTS


def top_k(name: str, value: Any) -> int:
    """0 keeps all tokens; so does -1, as in vLLM."""
    return 0 if value == -1 else int(integer(UINT32)(name, value))


SCALARS: Mapping[str, Kind] = {
    "temperature": number,
    "top_p": number,
    "presence_penalty": number,
    "frequency_penalty": number,
    "seed": integer(INT64),
    "n": integer(UINT32),
    "max_tokens": integer(UINT32),
    "top_k": top_k,
    "min_p": number,
    "repetition_penalty": number,
    "min_tokens": integer(UINT32),
    "ignore_eos": boolean,
    "beam_width": integer(UINT32),
    "length_penalty": number,
    "skip_special_tokens": boolean,
}
"""Fields that are called the same in SamplingParams."""
TEXT_LISTS = ("stop", "bad_words")
TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_token_ids")
REQUEST_SCALARS: Mapping[str, Kind] = {
    "model": text,
    "priority": integer(INT32),
    "session_id": text,
    "cache_salt": text,
    "public_prefix": boolean,
    "truncate_prompt_tokens": integer(INT32),
}
"""The same, of GenerateRequest."""
KNOWN = frozenset(
    {
        *(*SCALARS, *TEXT_LISTS, *TOKEN_LISTS, *REQUEST_SCALARS, *STRUCTURES),
        *(
            "return_token_ids",
            "logit_bias",
            "include_stop_str_in_output",
            "stream",
            "stream_options",
            "logprobs",
        ),
    }
)
"""What both routes take."""


def generate_request(body: Body) -> inference_pb2.GenerateRequest:
    """All but the prompt and the log-probabilities. Raises InvalidRequest."""
    request = inference_pb2.GenerateRequest(sampling=_sampling(body))
    for name, kind in REQUEST_SCALARS.items():
        value = given(body, name, kind)
        if value is not None:
            setattr(request, name, value)
    request.return_prompt_token_ids = bool(given(body, "return_token_ids", boolean))
    return request


def num_outputs(request: inference_pb2.GenerateRequest) -> int:
    return request.sampling.n if request.sampling.HasField("n") else 1


def _sampling(body: Body) -> inference_pb2.SamplingParams:
    sampling = inference_pb2.SamplingParams()
    for name, kind in SCALARS.items():
        value = given(body, name, kind)
        if value is not None:
            setattr(sampling, name, value)
    for name in TOKEN_LISTS:
        getattr(sampling, name).extend(given(body, name, _counted(fields.token_ids)) or ())
    for name in TEXT_LISTS:
        getattr(sampling, name).extend(given(body, name, _counted(fields.texts)) or ())
    for token_id, bias in (given(body, "logit_bias", _counted(fields.mapping)) or {}).items():
        sampling.logit_bias[_token_id(token_id)] = number("logit_bias", bias)
    if given(body, "include_stop_str_in_output", boolean):
        sampling.include_stop_in_output = True
    structure = given_structure(body)
    if structure is not None:
        sampling.structured_output.CopyFrom(structure)
    return sampling


def _counted(kind: Kind) -> Kind:
    """Counts what is in a field before anybody looks through it: a body has room for a million."""

    def checked(name: str, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > COUNTS[name]:
            raise InvalidRequest.of(name, f"at most {COUNTS[name]} are allowed")
        return kind(name, value)

    return checked


def _token_id(written: str) -> int:
    """JSON's keys are strings."""
    if not (written.isascii() and written.isdigit()) or len(written) > 10 or int(written) > UINT32[1]:
        raise InvalidRequest.of("logit_bias", "each key must be a token id")
    return int(written)
