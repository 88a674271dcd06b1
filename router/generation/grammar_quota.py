"""Grammar quota: bounds how many requests of one client wait for a grammar on the workers at once.

A worker takes a limited number of requests without a first token (`max_unstarted`), and a grammar may take seconds to
compile. The quota keeps one client from filling all these permits: its further requests wait here. For one event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PERMITS_OF_A_WORKER = 8
"""Permits of one client per ready worker: a quarter of the default of `max_unstarted`."""


@dataclass(slots=True)
class _Client:
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    num_held: int = 0
    num_here: int = 0

    def hand_out(self, num_permits: int) -> None:
        while self.waiting and self.num_held < num_permits:
            permit = self.waiting.popleft()
            if not permit.done():
                permit.set_result(None)
                self.num_held += 1


class GrammarQuota:
    """Permits of all clients of one router. A client without requests is forgotten."""

    def __init__(self, num_workers: Callable[[], int]) -> None:
        """`num_workers` returns the number of ready workers. If it is 0, a client has the permits of one worker."""
        self._num_workers = num_workers
        self._clients: dict[str, _Client] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def hand_out(self) -> None:
        """Give permits to waiting requests. Call it when a worker has become ready, which adds permits."""
        for own in self._clients.values():
            if own.waiting:
                own.hand_out(self._num_permits)

    @property
    def _num_permits(self) -> int:
        return PERMITS_OF_A_WORKER * max(1, self._num_workers())

    @asynccontextmanager
    async def permit(self, client: str | None) -> AsyncIterator[Callable[[], None]]:
        """Wait for a permit, in order of arrival, and hold it for the life of the context. Yield a function that gives
        it back earlier.

        `client` None stands for a request without a grammar, which needs no permit.
        """
        if client is None:
            yield lambda: None
            return
        own = self._clients.setdefault(client, _Client())
        own.num_here += 1
        permit = asyncio.get_running_loop().create_future()
        own.waiting.append(permit)
        own.hand_out(self._num_permits)
        has_left = False

        def leave() -> None:
            nonlocal has_left
            if permit.done() and not permit.cancelled() and not has_left:
                has_left = True
                own.num_held -= 1
                own.hand_out(self._num_permits)

        try:
            await permit
            yield leave
        finally:
            leave()
            if permit.cancelled() and permit in own.waiting:
                own.waiting.remove(permit)
            own.num_here -= 1
            if not own.num_here:
                del self._clients[client]
