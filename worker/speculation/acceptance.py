"""Acceptance: how probable it is that the next draft is right, by sequence and by what it rests on. Pure."""

from dataclasses import dataclass, field

LONG_MATCHES = (3, 6, 12)
"""Lengths at which a match belongs to the next class."""
MODEL_CLASS = len(LONG_MATCHES) + 1
"""Class of a draft model's guesses, which rest on no match."""
NUM_CLASSES = MODEL_CLASS + 1
OWN_WINDOW = 16.0
"""Drafts of one sequence after which the weight of an earlier one has fallen to about a third."""
ALL_WINDOW = 128.0
FIRST_RATES = (0.2, 0.4, 0.6, 0.8, 0.6)
"""Rates of the classes before any draft was verified."""
PRIOR_DRAFTS = 3.0
"""Drafts that the rate of all sequences stands for, beside a sequence's own."""


def class_of(match_length: int) -> int:
    """Return the class of a match, from 0 on. Drafts after longer matches are right more often."""
    return sum(match_length >= length for length in LONG_MATCHES)


@dataclass(slots=True)
class Tried:
    """Weighted counts of drafts that were compared, and of those that were right."""

    right: float = 0.0
    all: float = 0.0

    def add(self, num_right: int, num_compared: int, window: float) -> None:
        kept = max(0.0, 1.0 - num_compared / window)
        self.right = self.right * kept + num_right
        self.all = self.all * kept + num_compared


def _first_tried() -> list[Tried]:
    return [Tried(rate * PRIOR_DRAFTS, PRIOR_DRAFTS) for rate in FIRST_RATES]


@dataclass(slots=True)
class Acceptance:
    """Rates of one engine. A sequence's own rates lie in its `Tried`, one for each class."""

    classes: list[Tried] = field(default_factory=_first_tried)

    def rate(self, own: Tried, match_class: int) -> float:
        """Return the probability that a draft is right if those before it in its step are, from 0 to 1."""
        of_all = self.classes[match_class]
        prior = of_all.right / of_all.all
        return (prior * PRIOR_DRAFTS + own.right) / (PRIOR_DRAFTS + own.all)

    def note(self, own: Tried, match_class: int, *, num_drafted: int, num_right: int) -> None:
        """Note that of `num_drafted` drafts of a step, at least one, the first `num_right` were right."""
        num_compared = min(num_right + 1, num_drafted)
        own.add(num_right, num_compared, OWN_WINDOW)
        self.classes[match_class].add(num_right, num_compared, ALL_WINDOW)
