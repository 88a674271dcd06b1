"""Row times: how long a step of decodes takes, by its exact number of rows. Pure.

The choice of drafts compares steps of a few rows more or less, so it needs each number by itself. What limits prompts
(scheduling/decode_times.py) compares powers of two.
"""

from bisect import bisect_left, insort
from math import sqrt

SMOOTHING = 0.1
"""Weight of the newest step in a moving average, where it took longer."""
SHORTER_SMOOTHING = 0.4
"""The same where it took less time. What disturbs a step only makes it longer."""


class RowTimes:
    """Moving averages of the seconds of steps, for each number of rows that occurred."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._tried = set[int]()
        self._known: list[int] = []
        """Numbers of rows, in rising order."""

    def observe(self, num_rows: int, seconds: float) -> bool:
        """Add the time of a step, and return whether it counts. The first step of a size may do first-time work."""
        if num_rows not in self._tried:
            self._tried.add(num_rows)
            return False
        known = self._seconds.get(num_rows)
        if known is None:
            insort(self._known, num_rows)
            self._seconds[num_rows] = seconds
        else:
            weight = SMOOTHING if seconds > known else SHORTER_SMOOTHING
            self._seconds[num_rows] = known + weight * (seconds - known)
        return True

    @property
    def most_rows(self) -> int:
        """Return the largest number of rows that was measured, 0 before any was."""
        return self._known[-1] if self._known else 0

    def is_known(self, num_rows: int) -> bool:
        return num_rows in self._seconds

    def expected(self, num_rows: int) -> float:
        """Return the expected seconds of a step, 0.0 before any was measured.

        Between two measured numbers the time is interpolated. Beyond them the nearest one is scaled by the square root
        of the ratio: the geometric mean of no growth and proportional growth.
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
        return self._seconds[nearest] * sqrt(num_rows / nearest)
