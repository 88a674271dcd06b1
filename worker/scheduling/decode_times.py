"""How long a step of decodes alone takes, by how many they are. Pure."""

from bisect import bisect_right
from dataclasses import dataclass
from math import sqrt

MEASURED_FOR_STEPS = 64
"""With prompts beside decodes, until those decodes are to be measured alone again: contexts grow meanwhile."""


@dataclass(slots=True)
class _Measured:
    decodes: float
    """The mean number, as the seconds are a mean."""
    seconds: float
    mixed_steps: int = 0
    """Since."""


class DecodeTimes:
    """A step reads the weights once for all of its decodes, so that sixteen take far less than sixteen times what one
    takes: a rate of tokens would not tell. One measurement is kept for each power of two at or below the number."""

    def __init__(self, *, smoothing: float) -> None:
        """`smoothing` is the weight of the newest step, above 0 and at most 1."""
        self._smoothing = smoothing
        self._measured: dict[int, _Measured] = {}
        """By a number's bit length."""

    def observe(self, decodes: int, seconds: float) -> None:
        """A step of `decodes` sequences, one at least, and no prompt."""
        measured = self._measured.setdefault(decodes.bit_length(), _Measured(float(decodes), seconds))
        measured.decodes += self._smoothing * (decodes - measured.decodes)
        measured.seconds += self._smoothing * (seconds - measured.seconds)
        measured.mixed_steps = 0

    def wants_measuring(self, decodes: int) -> bool:
        """Counts a step of so many decodes and a prompt. Whether about so many were never measured alone, or not for
        long: a step without prompts is then worth its time, which else nobody would take while prompts wait."""
        measured = self._measured.get(decodes.bit_length())
        if measured is None:
            return True
        measured.mixed_steps += 1
        return measured.mixed_steps > MEASURED_FOR_STEPS

    def expected(self, decodes: int) -> float:
        """Seconds, 0.0 before any step was seen. On the line between the next smaller and the next larger measurement;
        beyond all, the geometric mean of what it may be: as long, and as much longer or shorter as the number is."""
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
