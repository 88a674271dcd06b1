"""Supervisor watch: ends a supervisor that sends this router no list of workers any more.

Owns the count of silent checks. Does not own how a supervisor is killed (actor.py). Ray starts it again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
PATIENCE_SECONDS = 30.0
"""A healthy supervisor sends its list at least every four seconds."""
MAX_PATIENCE_SECONDS = 480.0
"""The limit doubles after each kill, up to this: on a busy machine the next supervisor takes long to import."""
END_SECONDS = 20.0


class SupervisorWatch:
    """Watch of one router. It counts checks, not seconds, so a router that was itself frozen counts only one."""

    def __init__(self, end: Callable[[], Awaitable[None]]) -> None:
        self._end = end
        self._num_silent = 0
        self._patience_seconds = PATIENCE_SECONDS

    def told(self) -> None:
        """Record a message of the supervisor."""
        self._num_silent, self._patience_seconds = 0, PATIENCE_SECONDS

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._num_silent += 1
            if self._num_silent * LOOK_SECONDS >= self._patience_seconds:
                await self._end_it()

    async def _end_it(self) -> None:
        logger.error("no message from the supervisor for %.0f s: ending it", self._patience_seconds)
        self._num_silent = 0
        self._patience_seconds = min(2 * self._patience_seconds, MAX_PATIENCE_SECONDS)
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._end()
        except Exception as error:  # Ray's control service may be down: the next check tries again
            logger.error("cannot end the supervisor: %s", type(error).__name__)
