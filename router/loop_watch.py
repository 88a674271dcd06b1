"""How late the event loop turns, and what keeps it in time.

While a callback runs nobody else is served: every token of every stream waits for it. `LoopWatch` measures that;
`spared_by_garbage_collection` takes the garbage collector's long walks out of it. Does not own what runs on the loop.
"""

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.005
LATE_SECONDS = 0.005
ALARM_SECONDS = 0.05
ALARM_PAUSE_SECONDS = 10.0
"""Between two warnings at least."""
YOUNG_OBJECTS = 10_000
"""Made and not yet freed before the collector looks at the young ones; 700 by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """What was seen of a loop for a while."""

    num_ticks: int = 0
    num_late: int = 0
    """By more than LATE_SECONDS."""
    worst_seconds: float = 0.0
    worst_computing_seconds: float = 0.0
    """The longest that the loop's own thread was busy meanwhile. What a tick was later than that is the machine's fault
    or another thread's: there was no processor to run on, or no interpreter lock."""

    def __str__(self) -> str:
        return (
            f"{self.num_late} of {self.num_ticks} ticks late by over {LATE_SECONDS * 1000:g} ms, "
            f"most {self.worst_seconds * 1000:.1f} ms, computing {self.worst_computing_seconds * 1000:.1f} ms of it"
        )


class LoopWatch:
    """Sleeps for a moment, again and again, and notes by how much it wakes too late."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._thread_clock = thread_clock
        self._seen = Lateness()
        self._alarm_at = -math.inf

    @property
    def seen(self) -> Lateness:
        return self._seen

    def take(self) -> Lateness:
        """What was seen since the last call of this."""
        seen, self._seen = self._seen, Lateness()
        return seen

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began, computed = self._clock(), self._thread_clock()
            await asyncio.sleep(TICK_SECONDS)
            self.note(self._clock() - began - TICK_SECONDS, self._thread_clock() - computed)

    def note(self, late_seconds: float, computing_seconds: float) -> None:
        """One tick: how late it was, and for how long the loop's thread computed since the one before."""
        seen = self._seen
        self._seen = Lateness(
            num_ticks=seen.num_ticks + 1,
            num_late=seen.num_late + (late_seconds > LATE_SECONDS),
            worst_seconds=max(seen.worst_seconds, late_seconds),
            worst_computing_seconds=max(seen.worst_computing_seconds, min(computing_seconds, late_seconds)),
        )
        if late_seconds > ALARM_SECONDS and self._clock() - self._alarm_at >= ALARM_PAUSE_SECONDS:
            self._alarm_at = self._clock()
            logger.warning(
                "the event loop stood still for %.0f ms and computed for %.0f ms of it",
                late_seconds * 1000,
                computing_seconds * 1000,
            )


@contextmanager
def spared_by_garbage_collection() -> Iterator[None]:
    """For the life of a process that has loaded what it keeps: the garbage collector leaves all of that alone, a walk
    of 600 ms with transformers in memory, and looks at what is new less often."""
    gc.collect()
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    try:
        yield
    finally:
        # Libraries in C++ complain at exit of what is never freed.
        gc.unfreeze()
        gc.set_threshold(*thresholds)
