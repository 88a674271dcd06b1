"""How many requests of one client wait for a grammar on the workers at once.

A worker has places for so many requests without a first token (`max_unstarted`), and grammars may take seconds each to
compile. So that one client's do not fill all those places, its further ones wait here. Used on one event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PLACES_A_CLIENT = 8
"""A quarter of `max_unstarted`."""


@dataclass(slots=True)
class _Client:
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PLACES_A_CLIENT))
    num_here: int = 0


class GrammarPlaces:
    """One for each router. A client without requests is forgotten."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}

    def __len__(self) -> int:
        return len(self._clients)

    @asynccontextmanager
    async def place(self, client: str | None) -> AsyncIterator[Callable[[], None]]:
        """Waits for one, in order of arrival, and keeps it until what it gives is called, or the context ends. None is
        for a request without a grammar, which needs no place."""
        if client is None:
            yield lambda: None
            return
        own = self._clients.setdefault(client, _Client())
        own.num_here += 1
        is_held = False

        def leave() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                own.places.release()

        try:
            await own.places.acquire()
            is_held = True
            yield leave
        finally:
            leave()
            own.num_here -= 1
            if not own.num_here:
                del self._clients[client]
