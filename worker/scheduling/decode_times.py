"""Decode times: how long a step of decodes alone takes, by the number of decodes. Pure."""

from bisect import bisect_right
from dataclasses import dataclass
from math import sqrt

MEASURED_FOR_STEPS = 64
"""Mixed steps after which decodes are measured alone again, because their contexts grow."""


@dataclass(slots=True)
class _Measured:
    decodes: float
    """Mean number of decodes."""
    seconds: float
    mixed_steps: int = 0
    """Mixed steps since this was last measured."""


class DecodeTimes:
    """Measured times of steps that only decode.

    A step reads the weights once for all its decodes, so 16 decodes take far less than 16 times as long as one. A rate
    in tokens would not show that. One measurement is kept for each power of two at or below the number of decodes.
    """

    def __init__(self, *, smoothing: float) -> None:
        """`smoothing` is the weight of the newest step, above 0 and at most 1."""
        self._smoothing = smoothing
        self._measured: dict[int, _Measured] = {}
        """Keyed by the bit length of the number of decodes."""

    def observe(self, decodes: int, seconds: float) -> None:
        """Add the time of a step with `decodes` rows (at least one) and no prompt to the moving averages."""
        measured = self._measured.setdefault(decodes.bit_length(), _Measured(float(decodes), seconds))
        measured.decodes += self._smoothing * (decodes - measured.decodes)
        measured.seconds += self._smoothing * (seconds - measured.seconds)
        measured.mixed_steps = 0

    def wants_measuring(self, decodes: int) -> bool:
        """Count a mixed step with this many decodes, and return whether the next step should decode without prompts.

        It should where about as many decodes were never measured alone, or not for MEASURED_FOR_STEPS mixed steps.
        While prompts wait, no other step would measure them.
        """
        measured = self._measured.get(decodes.bit_length())
        if measured is None:
            return True
        measured.mixed_steps += 1
        return measured.mixed_steps > MEASURED_FOR_STEPS

    def expected(self, decodes: int) -> float:
        """Return the expected seconds of a step that only decodes, 0.0 before any was measured.

        Between two measurements the time is interpolated. Beyond them the nearest one is scaled by the square root of
        the ratio of decodes: the geometric mean of no growth and proportional growth.
        """
        known = sorted(self._measured.values(), key=lambda measured: measured.decodes)
        if not known:
            return 0.0
        above = bisect_right(known, float(decodes), key=lambda measured: measured.decodes)
        if 0 < above < len(known):
            lower, upper = known[above - 1], known[above]
            share = (decodes - lower.decodes) / (upper.decodes - lower.decodes)
            return lower.seconds + share * (upper.seconds - lower.seconds)
        nearest = known[max(above - 1, 0)]
        return nearest.seconds * sqrt(decodes / nearest.decodes)
