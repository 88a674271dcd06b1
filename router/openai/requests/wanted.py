"""Checked calls of any API: their GenerateRequests, and what the client wants of the answer."""

from collections.abc import Mapping
from dataclasses import dataclass

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.echo import Echo
from blockyard.router.openai.requests.fields import (
    Body,
    Fields,
    boolean,
    given,
    mapping,
    object_schema,
    refuse_others,
)
from blockyard.router.openai.requests.prompts import set_ids
from blockyard.router.openai.requests.sampling import num_outputs
from blockyard.router.openai.requests.structures import STRUCTURES
from blockyard.router.openai.requests.unsupported import ignored_hints
from blockyard.router.parsing.reading import Reading

STREAM_OPTIONS: Fields = {
    "include_usage": boolean.said("The last chunk has the call's usage."),
    "continuous_usage_stats": boolean.said("With include_usage: every chunk has the usage so far."),
    "include_obfuscation": boolean.said("Ignored."),
}
STREAM_FIELDS: Fields = {
    "stream": boolean.said("Whether the answer comes as server-sent events. Default false."),
    "stream_options": mapping.then(lambda name, value: value, **object_schema(STREAM_OPTIONS)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """Form of the answer that the client wants."""

    streams: bool
    includes_usage: bool = False
    """Usage at the end of a stream, in a chunk of its own."""
    continuous_usage: bool = False
    """Usage of the call so far, in every chunk. Only with `includes_usage`, as in vLLM."""
    ignored: tuple[str, ...] = ()
    """Names of the body's hints, which have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    requests: tuple[inference_pb2.GenerateRequest, ...]
    """One per prompt. They differ only in the prompt, and in their ids once `named` has set them."""
    answering: Answering
    echo: Echo | None = None
    """How to return the prompts before the outputs. None: not at all."""
    reading: Reading | None = None
    """How to parse the outputs. None: not at all."""
    names: Mapping[str, str]
    """Maps fields of GenerateRequest to the names that this body has for them, where several are possible."""

    @property
    def outputs_a_prompt(self) -> int:
        return num_outputs(self.requests[0])

    @property
    def sequences_a_prompt(self) -> int:
        """Return the number of outputs or beams per prompt, at least 1. Invalid values are refused later."""
        return max(num_outputs(self.requests[0]), self.requests[0].sampling.beam_width, 1)

    @property
    def shows_token_ids(self) -> bool:
        """Return True if the client wants token ids. An echo asks for the prompt's tokens even if the client does
        not."""
        if self.echo is not None:
            return self.echo.shows_token_ids
        return self.requests[0].return_prompt_token_ids

    @property
    def prompts(self) -> list[str | None]:
        """Return the texts of the prompts as sent. None stands for a prompt of tokens, or one that may be truncated."""
        return [
            request.prompt
            if request.WhichOneof("input") == "prompt" and not request.HasField("truncate_prompt_tokens")
            else None
            for request in self.requests
        ]

    def named(self, request_id: str) -> None:
        """Set the ids of the requests, from the call's id."""
        set_ids(self.requests, request_id)


def field_names(body: Body, names: Mapping[str, str]) -> Mapping[str, str]:
    """Return `names` (by field of GenerateRequest) that are in the body, and its name for the structured output."""
    given = {field: name for field, name in names.items() if body.get(name) is not None}
    structures = [name for name in STRUCTURES if body.get(name) is not None]
    return given | ({"sampling.structured_output": structures[-1]} if structures else {})


def answering(body: Body) -> Answering:
    """Return the form of the answer that the body asks for. Raises InvalidRequest."""
    streams = bool(given(body, "stream", STREAM_FIELDS["stream"]))
    options = given(body, "stream_options", STREAM_FIELDS["stream_options"]) or {}
    if options and not streams:
        raise InvalidRequest.of("stream_options", "needs stream to be true")
    refuse_others(options, STREAM_OPTIONS, inside="stream_options.")
    requested = {
        name: options.get(name) is not None and kind(f"stream_options.{name}", options[name])
        for name, kind in STREAM_OPTIONS.items()
    }
    return Answering(
        streams=streams,
        includes_usage=requested["include_usage"],
        continuous_usage=requested["include_usage"] and requested["continuous_usage_stats"],
        ignored=ignored_hints(body),
    )
