"""Lengths in tokens, drawn from a distribution that a user gives as text. Pure.

512                   always 512
128-512               uniform, both ends included
normal:512:128        mean and standard deviation
lognormal:512:0.8     median, and standard deviation of the logarithm: a long tail, as real prompts have
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite, log
from random import Random

MAX_TOKENS = 2**24
FORMS = "512, 128-512, normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of lengths. `text` is the user's notation."""

    text: str
    _draw: Callable[[Random], float] = field(repr=False, compare=False)

    def draw(self, chance: Random) -> int:
        """Draw a length, from 1 to MAX_TOKENS."""
        return min(max(round(self._draw(chance)), 1), MAX_TOKENS)


def parse_lengths(text: str) -> Lengths:
    """Parse a distribution. Raise ValueError that lists the valid forms."""
    kind, *numbers = text.split(":")
    if numbers:
        return Lengths(text, _shaped(kind, numbers, text))
    least, most = parse_range(text)
    return Lengths(text, lambda chance: chance.randint(least, most))


def parse_range(text: str) -> tuple[int, int]:
    """Parse `5` or `2-5` into the lowest and the highest number. Raise ValueError."""
    low, dash, high = text.partition("-")
    try:
        least, most = int(low), int(high if dash else low)
    except ValueError:
        raise ValueError(f"{text!r} is not a distribution of lengths: {FORMS}") from None
    if not 1 <= least <= most <= MAX_TOKENS:
        raise ValueError(f"{text!r}: lengths must be from 1 to {MAX_TOKENS}, the lower one first")
    return least, most


def _shaped(kind: str, numbers: list[str], text: str) -> Callable[[Random], float]:
    try:
        middle, spread = (float(number) for number in numbers)
    except ValueError:
        raise ValueError(f"{text!r} is not a distribution of lengths: {FORMS}") from None
    if not (isfinite(middle) and isfinite(spread) and 1 <= middle <= MAX_TOKENS and spread >= 0):
        raise ValueError(
            f"{text!r}: the first number must be from 1 to {MAX_TOKENS}, and the second must not be negative"
        )
    match kind:
        case "normal":
            return lambda chance: chance.gauss(middle, spread)
        case "lognormal" if spread <= 5:
            return lambda chance: chance.lognormvariate(log(middle), spread)
    raise ValueError(f"{text!r} is not a distribution of lengths: {FORMS}, with a SIGMA of at most 5")
