"""Pauses of this process: on a crowded machine it may stand still for seconds, and then measures nothing."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

from blockyard.router.loop_watch import LoopWatch

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


class RunningClock:
    """Seconds in which this process ran. A thread counts them, so a pause of all threads adds one tick at most."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def __call__(self) -> float:
        return self._seconds

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _count(self) -> None:
        last = time.monotonic()
        while not self._is_over.wait(TICK_SECONDS):
            now = time.monotonic()
            self._seconds += min(now - last, LATE_SECONDS)
            last = now


@asynccontextmanager
async def free_loop(bound_seconds: float) -> AsyncIterator[None]:
    """Assert that nothing holds the event loop up for that long, be it by computing or by waiting.

    Pauses of the whole process do not count.
    """
    with RunningClock() as clock:
        computing, waiting = LoopWatch(TICK_SECONDS), LoopWatch(TICK_SECONDS, clock=clock)
        watching = [asyncio.create_task(watch.run()) for watch in (computing, waiting)]
        await asyncio.sleep(0)
        yield
        await asyncio.sleep(LATE_SECONDS)
        for task in watching:
            task.cancel()
    assert computing.seen.worst_computing_seconds < bound_seconds
    assert waiting.seen.worst_seconds < bound_seconds
