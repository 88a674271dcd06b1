"""How many requests of one client wait for a grammar on the workers at once.

A worker has places for so many requests without a first token (`max_unstarted`), and grammars may take seconds each to
compile. So that one client's do not fill all those places, its further ones wait here. Used on one event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PLACES_OF_A_WORKER = 8
"""One client may take so many: a quarter of `max_unstarted`."""


@dataclass(slots=True)
class _Client:
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    num_held: int = 0
    num_here: int = 0

    def hand_out(self, num_places: int) -> None:
        while self.waiting and self.num_held < num_places:
            place = self.waiting.popleft()
            if not place.done():
                place.set_result(None)
                self.num_held += 1


class GrammarPlaces:
    """One for each router. A client without requests is forgotten."""

    def __init__(self, num_workers: Callable[[], int]) -> None:
        """`num_workers` counts those that are ready; a client has the places of one where there is none."""
        self._num_workers = num_workers
        self._clients: dict[str, _Client] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def hand_out(self) -> None:
        """To be called when a worker has become ready."""
        for own in self._clients.values():
            if own.waiting:
                own.hand_out(self._num_places)

    @property
    def _num_places(self) -> int:
        return PLACES_OF_A_WORKER * max(1, self._num_workers())

    @asynccontextmanager
    async def place(self, client: str | None) -> AsyncIterator[Callable[[], None]]:
        """Waits for one, in order of arrival, and keeps it until what it gives is called, or the context ends. None is
        for a request without a grammar, which needs no place."""
        if client is None:
            yield lambda: None
            return
        own = self._clients.setdefault(client, _Client())
        own.num_here += 1
        place = asyncio.get_running_loop().create_future()
        own.waiting.append(place)
        own.hand_out(self._num_places)
        has_left = False

        def leave() -> None:
            nonlocal has_left
            if place.done() and not place.cancelled() and not has_left:
                has_left = True
                own.num_held -= 1
                own.hand_out(self._num_places)

        try:
            await place
            yield leave
        finally:
            leave()
            if place.cancelled() and place in own.waiting:
                own.waiting.remove(place)
            own.num_here -= 1
            if not own.num_here:
                del self._clients[client]
