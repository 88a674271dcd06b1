"""Supervision as a router sees it: a supervisor that falls silent, and models of its that cannot be served.

Owns the count of silent checks, and the pauses between attempts to serve. Does not own how a supervisor is killed or
models are changed (actor.py). Ray starts a supervisor again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from blockyard.router.config import ServedModel

logger = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
SILENCE_SECONDS = 30.0
"""Silence after which the supervisor is ended. A healthy one sends its list at least every four seconds."""
MAX_SILENCE_SECONDS = 480.0
"""The limit of silence doubles after each kill, up to this: on a busy machine a new supervisor takes long to start."""
END_SECONDS = 20.0
FIRST_PAUSE_SECONDS = 4.0
MAX_PAUSE_SECONDS = 120.0


class SupervisorWatch:
    """Watch of one router. It counts checks, not seconds, so a router that was itself frozen counts only one check."""

    def __init__(self, end: Callable[[Callable[[], bool]], Awaitable[None]]) -> None:
        """`end` gets a function that tells whether the supervisor is still silent."""
        self._end = end
        self._num_messages = 0
        self._num_silent = 0
        self._limit_seconds = SILENCE_SECONDS

    def heard(self) -> None:
        """Record a message of the supervisor."""
        self._num_messages += 1
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
        before = self._num_messages
        self._num_silent = 0
        self._limit_seconds = min(2 * self._limit_seconds, MAX_SILENCE_SECONDS)
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._end(lambda: self._num_messages == before)
        except Exception as error:  # Ray's control service may be down: the next check tries again
            logger.error("cannot end the supervisor: %s", type(error).__name__)


class Attempts:
    """Attempts of one router to serve the models that its supervisor names. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: tuple[Sequence[ServedModel], str] | None = None
        """Models of the last attempt that failed, and why."""
        self._pause_seconds = 0.0
        self._next_at = 0.0

    def is_due(self, models: Sequence[ServedModel]) -> bool:
        """Return False during the pause after a failed attempt to serve the same models."""
        return self._failed is None or self._failed[0] != models or self._clock() >= self._next_at

    def failed(self, models: Sequence[ServedModel], error: Exception | None) -> None:
        """Note a failed attempt. Each doubles the pause. One without an error, or that fails as the last did, is not
        logged."""
        is_again = self._failed is not None and self._failed[0] == models
        self._pause_seconds = (
            min(2 * self._pause_seconds, MAX_PAUSE_SECONDS) if is_again else FIRST_PAUSE_SECONDS
        )
        self._next_at = self._clock() + self._pause_seconds
        failed = models, str(error or "")
        if error is not None and self._failed != failed:
            logger.error(
                "a model cannot be served, and is tried again at longer and longer intervals: %s", error
            )
        self._failed = failed
