"""Whether a worker or router still answers its supervisor.

Owns how it is asked, and when silence means that it hangs. Does not own its end or its next start (supervisor.py).

Missed questions are counted, not seconds: a supervisor that was itself stopped for a minute finds one answer late. Only
one question is under way at a time, so an answer that is slow, as on a busy machine, still counts.
"""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf, isinf
from typing import TypeVar

from blockyard.deploy.supervision.replicas import PUSH_SECONDS

ANSWER_SECONDS = PUSH_SECONDS
"""An answer that takes longer is missed for now, and shows in `status`."""
QUESTION_SECONDS = PUSH_SECONDS + ANSWER_SECONDS
"""From one missed question to the next: the supervisor pauses between its looks."""
STARTING_SECONDS = 120.0
"""For one that starts, from its first answer on: it answers while it loads, with pauses as long as a library's import
on a busy machine. And for one that a new supervisor finds, which may have just begun."""
T = TypeVar("T")


class HungError(RuntimeError):
    """It lives and answers no more."""


class Pulse:
    """One life of a worker or router, as its answers show it."""

    def __init__(self, ask: Callable[[], Awaitable[object]], *, patience_seconds: float = inf) -> None:
        self.patience_seconds = patience_seconds
        """Silence for so long means that it hangs. Infinite until its first answer: it may wait for a node."""
        self.num_missed = 0
        """Looks in a row that had no answer."""
        self._ask = ask
        # At once: the answer comes as soon as its process has begun, and shows that a later silence is a freeze.
        self._asked: asyncio.Task[object] | None = asyncio.create_task(_awaited(ask()))
        self._hung = asyncio.Event()

    async def look(self) -> object | None:
        """Its answer, or None where it takes too long. Raises what the call raises, which is an answer too."""
        if self._asked is None:
            self._asked = asyncio.create_task(_awaited(self._ask()))
        await asyncio.wait({self._asked}, timeout=ANSWER_SECONDS)
        if self._asked is None or not self._asked.done():
            self.missed()
            return None
        asked, self._asked = self._asked, None
        self.num_missed = 0
        if isinf(self.patience_seconds):
            self.patience_seconds = STARTING_SECONDS
        return asked.result()

    def missed(self) -> None:
        self.num_missed += 1
        if self.num_missed * QUESTION_SECONDS >= self.patience_seconds:
            self._hung.set()

    async def unless_hung(self, work: Awaitable[T]) -> T:
        """What `work` brings. Raises HungError once the silence has been too long."""
        working, hung = asyncio.create_task(_awaited(work)), asyncio.create_task(self._hung.wait())
        try:
            await asyncio.wait({working, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise HungError(f"it did not answer for {self.patience_seconds:.0f} s and was killed")
            return working.result()
        finally:
            await _cancelled(working, hung)

    async def stop(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            await _cancelled(asked)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _cancelled(*tasks: asyncio.Task[T] | asyncio.Task[bool]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
