"""Embedding requests: the body of /v1/embeddings as EmbedRequests, one per input.

An input is text or token ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.fields import (
    UINT32,
    Body,
    Fields,
    Kind,
    given,
    integer,
    refuse_others,
    text,
)
from blockyard.router.openai.requests.prompts import prompts_kind, with_prompts
from blockyard.router.openai.requests.sampling import REQUEST_SCALARS

NAMES: Mapping[str, str] = {"prompt": "input", "prompt_token_ids": "input"}
"""The body's names of fields of EmbedRequest, where they differ."""
MAX_INPUTS = 2048
"""Most inputs of one call, as in OpenAI's API. Each is charged, placed and counted like a call of its own."""


def _format(name: str, value: Any) -> str:
    if value not in ("float", "base64"):
        raise InvalidRequest.of(name, "must be float or base64")
    return str(value)


_INPUT = prompts_kind(MAX_INPUTS)
_FORMAT = Kind(_format, {"type": "string", "enum": ["float", "base64", None]}).said(
    "Whether an embedding is a list of numbers, or the text of their bytes: base64 of little-endian float32. "
    "Default float."
)
_SHARED: Fields = {
    name: kind
    for name, kind in REQUEST_SCALARS.items()
    if name in inference_pb2.EmbedRequest.DESCRIPTOR.fields_by_name
}
"""Fields that mean the same as in a request that generates. Hints about its answer are not among them."""
FIELDS: Fields = {
    "input": _INPUT,
    **_SHARED,
    "dimensions": integer((1, UINT32[1])).said(
        "Numbers of an embedding: its first ones, at length 1 again. Default: all that the model makes."
    ),
    "encoding_format": _FORMAT,
    "user": text.said("Ignored: it changes nothing."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedEmbeddings:
    requests: tuple[inference_pb2.EmbedRequest, ...]
    """One per input. They differ only in the input."""
    is_base64: bool
    dimensions: int | None
    """Numbers of each embedding. None: all."""
    ignored: tuple[str, ...]
    """Names of the body's hints, which have no effect."""


def embeddings_wanted(body: Body) -> WantedEmbeddings:
    """Return a body of /v1/embeddings as checked requests, one per input. Raises InvalidRequest."""
    refuse_others(body, FIELDS)
    template = inference_pb2.EmbedRequest()
    for name in (*_SHARED, "dimensions"):
        value = given(body, name, FIELDS[name])
        if value is not None:
            setattr(template, name, value)
    is_base64 = given(body, "encoding_format", _FORMAT) == "base64"
    user = given(body, "user", FIELDS["user"])
    return WantedEmbeddings(
        requests=with_prompts(template, "input", _INPUT("input", body.get("input"))),
        is_base64=is_base64,
        dimensions=template.dimensions if template.HasField("dimensions") else None,
        ignored=() if user is None else ("user",),
    )
