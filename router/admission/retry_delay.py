"""When a refused request should come back: once what is held now is expected to have made room for it.

Pure but for the clock it is given. Does not own who is refused (ledger.py, dispatch/waiting_line.py).
"""

import time
from collections.abc import Callable
from math import exp

SMOOTHING_SECONDS = 10.0
"""Of time in which something was held: nothing is learned while nobody is here."""
FIRST_GUESS_SECONDS = 1.0
"""How long anything is held, until something was seen to end."""
MIN_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 30.0
SPREAD = 0.25
"""The share of a delay by which chance may lengthen it, or all who were sent away together would return together."""


class CompletionRate:
    """What is held now, and how fast it goes: what ended, over the time that things were held, both smoothed.

    The time is that of all which is held, added up, so that what is still running counts too and a standstill is
    noticed. By Little's law the rate of a hundred that are held a second each is a hundred a second, also where so many
    were never here before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._held_seconds = FIRST_GUESS_SECONDS
        self._ended = 1.0
        self.held = 0

    def begin(self, amount: int) -> None:
        self._pass_time()
        self.held += amount

    def end(self, amount: int) -> None:
        self._pass_time()
        self.held -= amount
        self._ended += amount

    def change(self, amount: int) -> None:
        """What is held turned out to be so much more, or less; nothing has ended."""
        self._pass_time()
        self.held += amount

    def seconds_to_free(self, amount: int, held: int | None = None) -> float:
        """Until so much has ended of all that is held, or of `held` of it."""
        self._pass_time()
        each_held_seconds = self._held_seconds / max(self._ended, 1e-9)
        return amount * each_held_seconds / max(self.held if held is None else held, 1)

    def _pass_time(self) -> None:
        now = self._clock()
        seconds, self._at = now - self._at, now
        if self.held > 0 and seconds > 0:
            keep = exp(-seconds / SMOOTHING_SECONDS)
            self._ended *= keep
            self._held_seconds *= keep
            self._held_seconds += self.held * SMOOTHING_SECONDS * (1 - keep)


def retry_delay_seconds(expected_seconds: float, chance: float) -> float:
    """What to tell a client, never less than expected within the bounds; `chance` is from 0 to 1."""
    longest = MAX_DELAY_SECONDS / (1 + SPREAD)
    return min(max(expected_seconds, MIN_DELAY_SECONDS), longest) * (1 + SPREAD * chance)
