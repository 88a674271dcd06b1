"""Pauses of this process, which on a crowded machine may stand still for seconds, and the work of its event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from .counted_work import lines_run

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


@asynccontextmanager
async def free_loop(most_lines: int, *, least_turns: int = 0) -> AsyncIterator[None]:
    """Assert that the event loop stays free, by counts: no callback runs more lines of Python than these.

    What computes or waits without a line of Python shows by the turns of the loop meanwhile, at least so many.
    """
    counts, turns = [0], 0
    run: Callable[[asyncio.Handle], None] = asyncio.Handle._run  # type: ignore[attr-defined]

    def counted_run(handle: asyncio.Handle) -> None:
        counts.append(lines_run(lambda: run(handle)))

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", counted_run)
        turning = asyncio.create_task(turn())
        try:
            yield
        finally:
            turning.cancel()
    print(f"at most {max(counts)} lines in a callback, {turns} turns")
    assert max(counts) <= most_lines
    assert turns >= least_turns
