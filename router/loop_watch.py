"""How long the event loop stands still.

While a callback runs nobody else is served: every token of every stream waits for it. `LoopWatch` measures that. Does
not own what runs on the loop.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from blockyard.proto.metrics.readings import Histogram, by_name
from blockyard.proto.metrics.table import ROUTER_METRICS

logger = logging.getLogger(__name__)

LATE_SECONDS = 0.005
ALARM_SECONDS = 0.05
START_SECONDS = 60.0
"""Seconds for which a router starts. Workers then load their models on the same cores, so pauses are usual."""
START_ALARM_SECONDS = 1.0
ALARM_PAUSE_SECONDS = 10.0
"""Between two warnings at least."""


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
        self.lag = Histogram(by_name(ROUTER_METRICS)["loop_lag_seconds"])
        """Of all ticks, whoever has taken what was seen."""
        self._tick_seconds = tick_seconds
        self._clock = clock
        self._thread_clock = thread_clock
        self._seen = Lateness()
        self._alarm_at = -math.inf
        self._started_at = clock()

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
        self.lag.observe(max(pause_seconds - self._tick_seconds, 0.0))
        self._seen = Lateness(
            num_ticks=seen.num_ticks + 1,
            num_late=seen.num_late + (pause_seconds > self._tick_seconds + LATE_SECONDS),
            worst_seconds=max(seen.worst_seconds, pause_seconds),
            worst_computing_seconds=max(seen.worst_computing_seconds, min(computing_seconds, pause_seconds)),
        )
        now = self._clock()
        alarm_seconds = START_ALARM_SECONDS if now - self._started_at < START_SECONDS else ALARM_SECONDS
        if pause_seconds > alarm_seconds and now - self._alarm_at >= ALARM_PAUSE_SECONDS:
            self._alarm_at = now
            logger.warning(
                "the event loop stood still for %.0f ms and computed for %.0f ms of it",
                pause_seconds * 1000,
                computing_seconds * 1000,
            )
