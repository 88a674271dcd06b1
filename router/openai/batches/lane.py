"""Lane: bounds how many requests of batches run at once, and holds new ones back while requests wait for a token.

So few requests of batches stand in the router's waiting line and the workers' queues, ahead of other requests.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from blockyard.router.calls.generating import Calls

MOST_UNSTARTED = 4
"""Requests without a token, for each ready worker, beyond which no line of a batch is sent."""
RECHECK_SECONDS = 0.02


class Lane:
    """Lane of one router, for all its batches. They share it in order of arrival, so each gets its turn."""

    def __init__(self, calls: Calls) -> None:
        self.most = calls.outputs_a_call
        self._groups = calls.groups
        self._entering = asyncio.Lock()
        self._left = asyncio.Event()
        self.num_held = 0
        """Sequences of the lines that run."""

    @property
    def _is_closed(self) -> bool:
        registry = self._groups.registry
        most = MOST_UNSTARTED * max(self._groups.num_ready_workers, 1)
        return registry.is_draining or registry.num_unstarted() >= most

    @asynccontextmanager
    async def turn(self, num_sequences: int) -> AsyncIterator[None]:
        """Wait for room, and hold it for the life of the context."""
        held = min(num_sequences, self.most)
        async with self._entering:
            while self.num_held + held > self.most:
                self._left.clear()
                await self._left.wait()
            while self._is_closed:  # noqa: ASYNC110 - other requests change it, and tell nobody
                await asyncio.sleep(RECHECK_SECONDS)
            self.num_held += held
        try:
            yield
        finally:
            self.num_held -= held
            self._left.set()
