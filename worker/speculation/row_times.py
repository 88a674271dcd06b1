"""Row times: how long a step of decodes takes, by its exact number of rows. Pure.

The choice of drafts compares steps of a few rows more or less, so it needs each number by itself. What limits prompts
(scheduling/decode_times.py) compares powers of two.
"""

from bisect import bisect_left, insort
from math import sqrt

SMOOTHING = 0.2
"""Weight of the newest step in a moving average."""


class RowTimes:
    """Moving averages of the seconds of steps, for each number of rows that occurred."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._known: list[int] = []
        """Numbers of rows, in rising order."""

    def observe(self, num_rows: int, seconds: float) -> None:
        """Add the time of a step. The first one of a size may do first-time work, so the second replaces it if it is
        shorter."""
        count = self._counts.get(num_rows, 0)
        if not count:
            insort(self._known, num_rows)
            self._seconds[num_rows] = seconds
        else:
            known = self._seconds[num_rows]
            weight = 1.0 if count == 1 and seconds < known else SMOOTHING
            self._seconds[num_rows] = known + weight * (seconds - known)
        self._counts[num_rows] = count + 1

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
