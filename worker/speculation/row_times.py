"""Row times: how long a step of decodes takes, by its exact number of rows. Pure.

The choice of drafts compares steps of a few rows more or less, so it needs each number by itself. What limits prompts
(scheduling/decode_times.py) compares powers of two.
"""

from bisect import bisect_left, bisect_right, insort
from math import sqrt

SMOOTHING = 0.1
"""Weight of the newest step in a moving average, where it took longer."""
SHORTER_SMOOTHING = 0.4
"""The same where it took less time. What disturbs a step only makes it longer."""
FEW_STEPS = 4
"""Up to so many steps of a size the shortest is its time. An average of few would follow a single pause."""
LONGEST_SHARE = 1.25
"""A step counts as at most this much longer than the average, because longer ones are pauses of the machine."""
WIDE_SHARE = 0.8
"""Two sizes whose ratio is at most this give a line. Between closer ones, the errors of both would give its slope."""


class RowTimes:
    """Moving averages of the seconds of steps, for each number of rows that occurred."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        """Measured steps of each number of rows. The first one of all is not measured, and sets 0."""
        self._known: list[int] = []
        """Numbers of rows, in rising order."""

    def observe(self, num_rows: int, seconds: float) -> bool:
        """Add the time of a step, and return whether it counts. The first step of a size may do first-time work."""
        if num_rows not in self._counts:
            self._counts[num_rows] = 0
            return False
        self._counts[num_rows] += 1
        known = self._seconds.get(num_rows)
        if known is None:
            insort(self._known, num_rows)
            self._seconds[num_rows] = seconds
        elif self._counts[num_rows] <= FEW_STEPS:
            self._seconds[num_rows] = min(known, seconds)
        else:
            weight = SMOOTHING if seconds > known else SHORTER_SMOOTHING
            self._seconds[num_rows] = known + weight * (min(seconds, LONGEST_SHARE * known) - known)
        return True

    @property
    def most_rows(self) -> int:
        """Return the largest number of rows that was measured, 0 before any was."""
        return self._known[-1] if self._known else 0

    def num_steps(self, num_rows: int) -> int:
        """Return how many steps of so many rows were measured."""
        return self._counts.get(num_rows, 0)

    def expected(self, num_rows: int) -> float:
        """Return the expected seconds of a step, 0.0 before any was measured.

        Between two measured numbers the time is interpolated. Beyond them the line through the nearest one and one of
        about half the rows, or the smallest, goes on. Where these are too close, the time grows by the square root of
        the rows: the geometric mean of no growth and proportional growth.
        """
        seconds = self._seconds.get(num_rows)
        if seconds is not None:
            return seconds
        known = self._known
        if not known:
            return 0.0
        above = bisect_left(known, num_rows)
        if 0 < above < len(known):
            lower, upper = known[above - 1], known[above]
            share = (num_rows - lower) / (upper - lower)
            return self._seconds[lower] + share * (self._seconds[upper] - self._seconds[lower])
        nearest = known[max(above - 1, 0)]
        if num_rows > nearest and known[0] <= WIDE_SHARE * nearest:
            return self._beyond(nearest, num_rows)
        return self._seconds[nearest] * sqrt(num_rows / nearest)

    def _beyond(self, nearest: int, num_rows: int) -> float:
        """Return the seconds of more rows than `nearest`, the most that were measured. They never take less time."""
        lower = self._known[max(bisect_right(self._known, nearest // 2) - 1, 0)]
        a_row = (self._seconds[nearest] - self._seconds[lower]) / (nearest - lower)
        return self._seconds[nearest] + max(a_row, 0.0) * (num_rows - nearest)
