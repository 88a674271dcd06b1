"""Open requests of one link: the sink of each handle, and the outputs that have not ended.

Owns the table alone. The link (link.py) owns the messages.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from blockyard.router.cluster.events import Lost, Refused, Reported, Sink, Tokens


@dataclass(frozen=True, slots=True)
class _Open:
    """One open request."""

    sink: Sink
    outputs: set[int]
    """Indexes of the outputs that have not ended."""


class OpenRequests:
    """Table of the requests that one worker runs for this router, by handle (their number on the stream).

    A request leaves it when its last output ends, when it is refused or cancelled, or when the stream is lost.
    """

    def __init__(self) -> None:
        self._by_handle: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._by_handle)

    def add(self, handle: int, sink: Sink, outputs: Iterable[int]) -> None:
        self._by_handle[handle] = _Open(sink, set(outputs))

    def cancel(self, handle: int, index: int | None) -> tuple[bool, int | None]:
        """Remove a request, whose sink then gets nothing more, or end one of its outputs.

        Return whether to tell the worker, and which output to cancel there. None stands for the whole request, also
        after its last output.
        """
        request = self._by_handle.get(handle)
        if request is None or (index is not None and index not in request.outputs):
            return False, None
        if index is not None:
            request.outputs.discard(index)
            if request.outputs:
                return True, index
        del self._by_handle[handle]
        return True, None

    def deal(self, handle: int, event: Reported) -> None:
        """Pass an event to the request's sink, and remove the request with its last output. A cancelled request has no
        sink.

        Events of a single cancelled output still reach the sink, which ignores them.
        """
        request = self._by_handle.get(handle)
        if request is None:
            return
        match event:
            case Tokens(finish_reason=finish_reason):
                if finish_reason:
                    request.outputs.discard(event.index)
            case Refused():
                request.outputs.clear()
        if not request.outputs:
            del self._by_handle[handle]
        request.sink(event)

    def end_all(self, *, is_death: bool) -> None:
        requests, self._by_handle = self._by_handle, {}
        for request in requests.values():
            request.sink(Lost(is_death=is_death))
