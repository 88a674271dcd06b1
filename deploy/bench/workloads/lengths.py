"""Lengths in tokens, drawn from a distribution that a user writes as a word. Pure.

512                   always 512
128-512               uniform, both ends included
normal:512:128        mean and standard deviation
lognormal:512:0.8     median, and the standard deviation of the logarithm: a long tail, as real prompts have
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite, log
from random import Random

MAX_TOKENS = 2**24
FORMS = "512, 128-512, normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA"


@dataclass(frozen=True, slots=True)
class Lengths:
    """`text` is what the user wrote."""

    text: str
    _draw: Callable[[Random], float] = field(repr=False, compare=False)

    def draw(self, chance: Random) -> int:
        """At least 1 token, at most MAX_TOKENS."""
        return min(max(round(self._draw(chance)), 1), MAX_TOKENS)


def parse_lengths(text: str) -> Lengths:
    """Raises ValueError that says what may be written."""
    kind, *numbers = text.split(":")
    if numbers:
        return Lengths(text, _shaped(kind, numbers, text))
    least, most = parse_range(text)
    return Lengths(text, lambda chance: chance.randint(least, most))


def parse_range(text: str) -> tuple[int, int]:
    """`5` or `2-5`. Raises ValueError."""
    low, dash, high = text.partition("-")
    try:
        least, most = int(low), int(high if dash else low)
    except ValueError:
        raise ValueError(f"{text!r} is no distribution of lengths: {FORMS}") from None
    if not 1 <= least <= most <= MAX_TOKENS:
        raise ValueError(f"{text!r}: lengths are from 1 to {MAX_TOKENS}, the lower one first")
    return least, most


def _shaped(kind: str, numbers: list[str], text: str) -> Callable[[Random], float]:
    try:
        middle, spread = (float(number) for number in numbers)
    except ValueError:
        raise ValueError(f"{text!r} is no distribution of lengths: {FORMS}") from None
    if not (isfinite(middle) and isfinite(spread) and 1 <= middle <= MAX_TOKENS and spread >= 0):
        raise ValueError(f"{text!r}: the middle is from 1 to {MAX_TOKENS} tokens, the spread not negative")
    match kind:
        case "normal":
            return lambda chance: chance.gauss(middle, spread)
        case "lognormal" if spread <= 5:
            return lambda chance: chance.lognormvariate(log(middle), spread)
    raise ValueError(f"{text!r} is no distribution of lengths: {FORMS}, with a SIGMA of at most 5")
