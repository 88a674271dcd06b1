"""Pauses of this process: on a crowded machine it may stand still for seconds, and then measures nothing."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

TICK_SECONDS = 0.005
LATE_SECONDS = 0.02
"""A tick of this process's event loop that takes longer counts as a pause."""


@dataclass(slots=True)
class Pauses:
    """Times in which this process's own event loop stood still. It then measures nothing."""

    found: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each, on the monotonic clock."""

    def seconds(self, begin: float, end: float) -> float:
        """Return the length of all pauses between two times."""
        return sum(max(0.0, min(end, ended) - max(begin, began)) for began, ended in self.found)

    async def watch(self) -> None:
        """Look for pauses until this is cancelled."""
        last = time.monotonic()
        while True:
            try:
                await asyncio.sleep(TICK_SECONDS)
            finally:
                began, last = last, time.monotonic()
                if last - began > LATE_SECONDS:
                    self.found.append((began, last))


@asynccontextmanager
async def watched_pauses() -> AsyncIterator[Pauses]:
    """Yield the pauses of this process while the context lasts."""
    pauses = Pauses()
    task = asyncio.create_task(pauses.watch())
    try:
        yield pauses
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
