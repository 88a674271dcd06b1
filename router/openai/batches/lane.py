"""Lane: bounds how many requests of batches run at once, and holds new ones back while other requests wait."""

import asyncio
from collections.abc import Callable

from blockyard.router.calls.generating import Calls

MOST_WAITING = 4
"""Requests without a worker, beyond which no line of a batch is sent: they would wait behind it."""
RECHECK_SECONDS = 0.02


class Lane:
    """Lane of one router, for all its batches. They share it in order of arrival, so each gets its turn."""

    def __init__(self, calls: Calls) -> None:
        self._most = calls.outputs_a_call
        self._registry = calls.parts.registry
        self._entering = asyncio.Lock()
        self._left = asyncio.Event()
        self.num_held = 0
        """Sequences of the lines that run."""

    async def enter(self, num_sequences: int) -> Callable[[], None]:
        """Wait for room, and return the function that gives it back."""
        held = min(num_sequences, self._most)
        async with self._entering:
            while self.num_held + held > self._most:
                self._left.clear()
                await self._left.wait()
            while self._registry.is_draining or self._registry.num_waiting() > MOST_WAITING:  # noqa: ASYNC110
                await asyncio.sleep(RECHECK_SECONDS)
            self.num_held += held

        def leave() -> None:
            self.num_held -= held
            self._left.set()

        return leave
