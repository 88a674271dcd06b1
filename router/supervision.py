"""Supervisor watch: ends a supervisor that sends this router no list of workers any more.

Owns the count of silent checks. Does not own how a supervisor is killed (actor.py). Ray starts it again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
SILENCE_SECONDS = 30.0
"""Silence after which the supervisor is ended. A healthy one sends its list at least every four seconds."""
MAX_SILENCE_SECONDS = 480.0
"""The limit of silence doubles after each kill, up to this: on a busy machine a new supervisor takes long to start."""
END_SECONDS = 20.0


class SupervisorWatch:
    """Watch of one router. It counts checks, not seconds, so a router that was itself frozen counts only one check."""

    def __init__(self, end: Callable[[], Awaitable[None]]) -> None:
        self._end = end
        self._num_silent = 0
        self._limit_seconds = SILENCE_SECONDS

    def heard(self) -> None:
        """Record a message of the supervisor."""
        self._num_silent, self._limit_seconds = 0, SILENCE_SECONDS

    async def run(self) -> None:
        """Check at intervals until cancelled, and end a supervisor that is silent for too long."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._num_silent += 1
            if self._num_silent * CHECK_SECONDS >= self._limit_seconds:
                await self._end_it()

    async def _end_it(self) -> None:
        logger.error("no message from the supervisor for %.0f s: ending it", self._limit_seconds)
        self._num_silent = 0
        self._limit_seconds = min(2 * self._limit_seconds, MAX_SILENCE_SECONDS)
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._end()
        except Exception as error:  # Ray's control service may be down: the next check tries again
            logger.error("cannot end the supervisor: %s", type(error).__name__)
