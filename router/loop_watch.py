"""How long the event loop stands still, and what keeps it turning.

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

LATE_SECONDS = 0.005
ALARM_SECONDS = 0.05
ALARM_PAUSE_SECONDS = 10.0
"""Between two warnings at least."""
COLLECT_AFTER = (1500, 4, 200)
"""Objects made and not yet freed before the collector walks the young ones, such walks before one of the middle
generation, and those before one of everything (700, 10, 10 by default). On a busy machine a walk over 10,000 young ones
took 5 ms, and 5 to 18 where most of them were garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """What was seen of a loop for a while. Pauses are from tick to tick: nothing held the loop for longer than the
    worst, and it may have been a tick less."""

    num_ticks: int = 0
    num_late: int = 0
    """By more than LATE_SECONDS."""
    worst_seconds: float = 0.0
    worst_computing_seconds: float = 0.0
    """The longest that the loop's own thread was busy in one pause. What a pause is longer than that is the machine's
    fault or another thread's: there was no processor to run on, or no interpreter lock."""

    def __str__(self) -> str:
        return (
            f"{self.num_late} of {self.num_ticks} ticks late by over {LATE_SECONDS * 1000:g} ms, "
            f"longest pause {self.worst_seconds * 1000:.1f} ms, "
            f"computing {self.worst_computing_seconds * 1000:.1f} ms of it"
        )


class LoopWatch:
    """Sleeps for a moment, again and again, and notes how long it was away. Counted from the tick before and not from
    when it should have woken: a callback that begins with the sleep would seem shorter by all of it."""

    def __init__(
        self,
        tick_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._tick_seconds = tick_seconds
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
        last, last_computing = self._clock(), self._thread_clock()
        while True:
            await asyncio.sleep(self._tick_seconds)
            now, computing = self._clock(), self._thread_clock()
            self.note(now - last, computing - last_computing)
            last, last_computing = now, computing

    def note(self, pause_seconds: float, computing_seconds: float) -> None:
        """One tick: how long after the one before, and for how long the loop's thread computed meanwhile."""
        seen = self._seen
        self._seen = Lateness(
            num_ticks=seen.num_ticks + 1,
            num_late=seen.num_late + (pause_seconds > self._tick_seconds + LATE_SECONDS),
            worst_seconds=max(seen.worst_seconds, pause_seconds),
            worst_computing_seconds=max(seen.worst_computing_seconds, min(computing_seconds, pause_seconds)),
        )
        if pause_seconds > ALARM_SECONDS and self._clock() - self._alarm_at >= ALARM_PAUSE_SECONDS:
            self._alarm_at = self._clock()
            logger.warning(
                "the event loop stood still for %.0f ms and computed for %.0f ms of it",
                pause_seconds * 1000,
                computing_seconds * 1000,
            )


@contextmanager
def spared_by_garbage_collection() -> Iterator[None]:
    """For the life of a process that has loaded what it keeps: the garbage collector leaves all of that alone, a walk
    of 600 ms with transformers in memory, and looks at what is new in small portions."""
    gc.collect()
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        # Libraries in C++ complain at exit of what is never freed.
        gc.unfreeze()
        gc.set_threshold(*thresholds)
