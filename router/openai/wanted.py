"""What a client of either route has asked for, checked as far as JSON goes."""

from dataclasses import dataclass
from typing import Literal

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.fields import Body, boolean, given, mapping, refuse_others
from blockyard.router.openai.sampling_fields import num_outputs

Route = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    route: Route
    requests: tuple[inference_pb2.GenerateRequest, ...]
    """One for each prompt; they differ in nothing else."""
    streams: bool
    includes_usage: bool
    """At the end of a stream, in a chunk of its own."""

    @property
    def outputs_a_prompt(self) -> int:
        return num_outputs(self.requests[0])

    @property
    def sequences_a_prompt(self) -> int:
        """At least 1; what is not allowed is refused later."""
        return max(num_outputs(self.requests[0]), self.requests[0].sampling.beam_width, 1)

    def named(self, request_id: str) -> None:
        """Gives the requests their ids: the call's, and a number behind it where there are several."""
        for number, request in enumerate(self.requests):
            request.request_id = request_id if len(self.requests) == 1 else f"{request_id}-{number}"


def stream_wishes(body: Body) -> tuple[bool, bool]:
    """Whether it streams, and whether with usage. Raises InvalidRequest."""
    streams = bool(given(body, "stream", boolean))
    options = given(body, "stream_options", mapping)
    if options is None:
        return streams, False
    if not streams:
        raise InvalidRequest.of("stream_options", "is for streams")
    refuse_others(options, ("include_usage", "include_obfuscation"), inside="stream_options.")
    return streams, bool(given(options, "include_usage", boolean))
