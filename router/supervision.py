"""Whether the supervisor still tells this router who the workers are, and what happens when it falls silent.

Owns the count of its silence. Does not own how a supervisor is ended (actor.py): Ray starts it again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
PATIENCE_SECONDS = 30.0
"""A sound supervisor tells routers of workers every four seconds at most."""
MAX_PATIENCE_SECONDS = 480.0
"""Doubled after each end until then: the next supervisor has much to import on a busy machine."""
END_SECONDS = 20.0


class SupervisorWatch:
    """Of one router. Looks are counted, not seconds: a router that was itself frozen finds one look without a word."""

    def __init__(self, end: Callable[[], Awaitable[None]]) -> None:
        self._end = end
        self._num_silent = 0
        self._patience_seconds = PATIENCE_SECONDS

    def told(self) -> None:
        """The supervisor lives."""
        self._num_silent, self._patience_seconds = 0, PATIENCE_SECONDS

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._num_silent += 1
            if self._num_silent * LOOK_SECONDS >= self._patience_seconds:
                await self._end_it()

    async def _end_it(self) -> None:
        logger.error("the supervisor has said nothing for %.0f s: it is ended", self._patience_seconds)
        self._num_silent = 0
        self._patience_seconds = min(2 * self._patience_seconds, MAX_PATIENCE_SECONDS)
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._end()
        except Exception as error:  # Ray's control service may be away: the next look tries again.
            logger.error("the supervisor could not be ended: %s", type(error).__name__)
