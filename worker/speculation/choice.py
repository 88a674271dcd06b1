"""Choice of drafts: how many of a step's possible drafts make its tokens a second most. Pure arithmetic."""

from collections.abc import Callable, Sequence
from itertools import accumulate

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 32, 48, 64, 96, 128)
"""Numbers of drafts in a step that are compared."""
LEAST_GAIN = 1.1
"""Drafts of a sequence that runs alone must be expected to make tokens this much faster, or there are none. Measured
times are not exact, and the best of several numbers is the one whose error flatters it most."""
LEAST_GAIN_OF_MANY = 1.2
"""The same where several run. Those with right drafts end early, and the last ones then run in smaller steps."""


def least_gain(num_rows: int) -> float:
    """Return how much faster drafts must be expected to make the tokens of `num_rows` decodes."""
    return LEAST_GAIN if num_rows == 1 else LEAST_GAIN_OF_MANY


def most_useful(odds: Sequence[float], num_rows: int, seconds: Callable[[int], float]) -> int:
    """Return how many drafts to add to `num_rows` decodes, 0 where any number would lose.

    `odds` are the probabilities that each of the possible drafts gives a token, in falling order. `seconds` returns the
    time of a step of so many rows.
    """
    alone = seconds(num_rows)
    if not alone or not odds:
        return 0
    gained = list(accumulate(odds))
    best, best_rate = 0, least_gain(num_rows) * num_rows / alone
    for size in sorted({*(size for size in SIZES if size < len(odds)), len(odds)}):
        rate = (num_rows + gained[size - 1]) / seconds(num_rows + size)
        if rate > best_rate:
            best, best_rate = size, rate
    return best


def can_gain(most: int, num_rows: int, seconds: Callable[[int], float]) -> bool:
    """Return whether up to `most` drafts beside `num_rows` decodes would gain if all of them were right."""
    return most_useful([1.0] * most, num_rows, seconds) > 0


def shares(odds_of: Sequence[Sequence[float]], total: int) -> list[int]:
    """Divide `total` drafts among sequences by the probability of each draft, and return the number for each.

    Each sequence's odds fall, so the most probable drafts are the first ones of each sequence.
    """
    ranked = sorted(
        (-odds, place, owner) for owner, own in enumerate(odds_of) for place, odds in enumerate(own)
    )
    counts = [0] * len(odds_of)
    for _, _, owner in ranked[:total]:
        counts[owner] += 1
    return counts
