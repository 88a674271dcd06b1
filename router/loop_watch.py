"""Loop watch: measures how long the event loop stands still.

While a callback runs, every token of every stream waits. Does not own what runs on the loop.
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
"""Startup time of a router. Workers then load their models on the same cores, so pauses are usual."""
START_ALARM_SECONDS = 1.0
IDLE_SHARE = 0.1
"""The loop counts as idle while its thread computes for less than this share of the last IDLE_SECONDS."""
IDLE_SECONDS = 1.0
BUSY_SHARE = 0.5
"""A sleep in which the thread computes for this share of a tick or more ends an idle time at once."""
IDLE_TICKS = 4
"""Ticks for which the watch of an idle loop sleeps, because each of its wake-ups costs CPU time."""
ALARM_PAUSE_SECONDS = 10.0
"""Least time between two warnings."""


# Not frozen, as each tick counts in it.
@dataclass(slots=True, kw_only=True)
class Lateness:
    """Pauses of an event loop over some time. A pause is the time between two ticks of the watch.

    No callback blocked a busy loop for longer than the worst pause. The longest may have been shorter by one tick, or
    by IDLE_TICKS ticks after the loop was idle. A pause within a sleep of an idle loop counts what it computed.
    """

    num_ticks: int = 0
    num_late: int = 0
    """Ticks late by more than LATE_SECONDS."""
    worst_seconds: float = 0.0
    worst_computing_seconds: float = 0.0
    """Longest computation of the loop's own thread within one pause.

    The rest of a pause has other causes: no free processor, or another thread with the interpreter lock.
    """

    def __str__(self) -> str:
        return (
            f"{self.num_late} of {self.num_ticks} ticks late by over {LATE_SECONDS * 1000:g} ms, "
            f"longest pause {self.worst_seconds * 1000:.1f} ms, "
            f"computing {self.worst_computing_seconds * 1000:.1f} ms of it"
        )


class LoopWatch:
    """Sleeps for one tick again and again, and measures how long each sleep really took.

    The measure starts at the last tick, not at the expected end of the sleep. Otherwise a callback that begins with the
    sleep would seem shorter.
    """

    def __init__(
        self,
        tick_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.lag = Histogram(by_name(ROUTER_METRICS)["loop_lag_seconds"])
        """Lateness of all ticks, in seconds. `take` does not reset it."""
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
        """Return the pauses since the last call of `take`."""
        seen, self._seen = self._seen, Lateness()
        return seen

    async def run(self) -> None:
        """Measure until cancelled, and log long pauses."""
        last, last_computing = self._clock(), self._thread_clock()
        tick_seconds = sleep_seconds = self._tick_seconds
        share = 1.0
        while True:
            await asyncio.sleep(sleep_seconds)
            now, computing = self._clock(), self._thread_clock()
            pause_seconds, computing_seconds = now - last, computing - last_computing
            last, last_computing = now, computing
            if sleep_seconds > tick_seconds and pause_seconds <= sleep_seconds + LATE_SECONDS:
                # The sleep was long, and not late. No more than the computation was a pause.
                self.note(max(tick_seconds, computing_seconds), computing_seconds)
            else:
                self.note(pause_seconds, computing_seconds)
            # The router's own work once a second makes a tick busy, but not a second.
            earlier = share * max(1 - pause_seconds / IDLE_SECONDS, 0.0)
            share = earlier + computing_seconds / max(pause_seconds, IDLE_SECONDS)
            is_idle = share < IDLE_SHARE and computing_seconds < BUSY_SHARE * tick_seconds
            sleep_seconds = tick_seconds * (IDLE_TICKS if is_idle else 1)

    def note(self, pause_seconds: float, computing_seconds: float) -> None:
        """Count one tick, and log a warning if the pause was long.

        `pause_seconds` is the time since the last tick, `computing_seconds` the loop thread's CPU time within it.
        """
        seen = self._seen
        self.lag.observe(max(pause_seconds - self._tick_seconds, 0.0))
        seen.num_ticks += 1
        seen.num_late += pause_seconds > self._tick_seconds + LATE_SECONDS
        seen.worst_seconds = max(seen.worst_seconds, pause_seconds)
        seen.worst_computing_seconds = max(
            seen.worst_computing_seconds, min(computing_seconds, pause_seconds)
        )
        if pause_seconds <= ALARM_SECONDS:
            return
        now = self._clock()
        alarm_seconds = START_ALARM_SECONDS if now - self._started_at < START_SECONDS else ALARM_SECONDS
        if pause_seconds > alarm_seconds and now - self._alarm_at >= ALARM_PAUSE_SECONDS:
            self._alarm_at = now
            logger.warning(
                "the event loop stood still for %.0f ms and computed for %.0f ms of it",
                pause_seconds * 1000,
                computing_seconds * 1000,
            )
