"""Face: the form that one API gives to the answer of a call. All APIs run the same calls and read the same deltas.

Owns what a face must do. Does not own any API's form (chat_face.py, ../responses/) or the calls (../completions.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import RouterError
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.openai.answers.tally import Tally
from blockyard.router.openai.requests.wanted import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Facts about the call that its answer has."""

    request_id: str
    model: str
    created: int
    """Time of the call in Unix seconds."""


class Face(Protocol):
    """Form of one call's answer."""

    @property
    def tally(self) -> Tally:
        """Return the counts of the call. Of a call that is answered whole, all deltas are added to it from outside."""

    async def whole(self, outputs: Sequence[inference_pb2.Output]) -> dict[str, Any]:
        """Return the answer of a call that does not stream."""

    def events(self, delta: Delta) -> bytes:
        """Add a delta to the tally, and return its server-sent events, or nothing if it tells nothing yet."""

    async def end(self) -> bytes:
        """Return the events after the last delta of a stream, with `[DONE]` where the API has it."""

    def failed(self, error: RouterError) -> bytes:
        """Return the events that end a stream which has begun and cannot go on."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked call, and the face of its answer."""

    wanted: Wanted
    face: Callable[[Head], Face]
