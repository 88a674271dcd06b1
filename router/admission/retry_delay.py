"""Retry delay: estimates when enough of what is held now will have ended to make room for a refused request.

Pure: the clock is an argument. Does not own the refusals (ledger.py, dispatch/waiting_line.py).
"""

import time
from collections.abc import Callable
from math import exp

SMOOTHING_SECONDS = 10.0
"""Time constant of the average. Only time in which something was held counts."""
FIRST_GUESS_SECONDS = 1.0
"""Duration of a request that the average begins with."""
MIN_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 30.0
SPREAD = 0.25
"""Jitter: a random lengthening of the delay by at most this part. It keeps refused clients from returning together."""


class CompletionRate:
    """The amount held now, and the rate at which it ends: what ended, divided by the time it was held, both smoothed.

    The time is the sum over everything held. Running requests count too, so a standstill is noticed. By Little's law,
    100 requests held for a second each end at 100 a second, even if there were never 100 before.
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
        """Change the amount held by `amount`, although nothing has begun or ended."""
        self._pass_time()
        self.held += amount

    def seconds_to_free(self, amount: int, held: int | None = None) -> float:
        """Return the expected seconds until `amount` has ended, of everything held now or of `held`."""
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
    """Return the delay to send to a refused client: the expected one within the bounds, lengthened at random.

    `chance` is from 0 to 1.
    """
    longest = MAX_DELAY_SECONDS / (1 + SPREAD)
    return min(max(expected_seconds, MIN_DELAY_SECONDS), longest) * (1 + SPREAD * chance)
