"""The requests that one worker has of this router: who hears of which handle, and which outputs have not ended.

Owns the table alone. How messages travel is the link's (link.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from blockyard.router.cluster.events import Lost, Refused, Sink, Tokens


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that the worker has."""

    sink: Sink
    outputs: set[int]
    """Those that have not ended."""


class OpenRequests:
    """By handle. An output that ends leaves its request open as long as there are others."""

    def __init__(self) -> None:
        self._by_handle: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._by_handle)

    def add(self, handle: int, sink: Sink, outputs: Iterable[int]) -> None:
        self._by_handle[handle] = _Open(sink, set(outputs))

    def cancel(self, handle: int, index: int | None) -> tuple[bool, int | None]:
        """Nothing more comes for this handle, or for one output of it. Whether the worker is to be told, and of which
        output: None for the whole request."""
        request = self._by_handle.get(handle)
        if request is None or (index is not None and index not in request.outputs):
            return False, None
        if index is not None:
            request.outputs.discard(index)
            if request.outputs:
                return True, index
        del self._by_handle[handle]
        return True, None

    def deal(self, handle: int, event: Tokens | Refused) -> None:
        """A request that was cancelled meanwhile has no sink any more. Of an output that was, the sink knows."""
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
