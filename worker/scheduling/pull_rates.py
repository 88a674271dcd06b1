"""Pull rates: how long a pull takes, from those that have ended. Routers price later pulls by them. Pure."""

KEPT_SHARE = 0.8
"""Share of their weight that earlier measurements keep at each new one."""
LEAST_SECONDS = 1e-6
"""Shortest time of a transfer, so that a rate is finite."""


class PullRates:
    """Moving averages of the set-up of pulls, and of the rate at which their bytes arrive. Both are 0 until one was
    measured."""

    def __init__(self) -> None:
        self.setup_seconds = 0.0
        """Time of a pull without that of its bytes: until its source answers, and until the engine takes the blocks.

        Both engines do that between two steps.
        """
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Rate after the answer. Each transfer counts by its time, so a short one of a few blocks says little."""
        return self._bytes / self._seconds if self._seconds else 0.0

    def answered(self, setup_seconds: float, num_bytes: float, transfer_seconds: float) -> None:
        """Add a pull that its source answered, and the bytes that have arrived. Time may have ended it."""
        if self.setup_seconds:
            setup_seconds = self.setup_seconds + (1 - KEPT_SHARE) * (setup_seconds - self.setup_seconds)
        self.setup_seconds = max(setup_seconds, LEAST_SECONDS)
        self._bytes = KEPT_SHARE * self._bytes + num_bytes
        self._seconds = KEPT_SHARE * self._seconds + max(transfer_seconds, LEAST_SECONDS)

    def unanswered(self, seconds: float) -> None:
        """Add a pull whose time ran out before an answer. The set-up takes longer than `seconds`."""
        if seconds > self.setup_seconds > 0:
            self.setup_seconds += (1 - KEPT_SHARE) * (seconds - self.setup_seconds)
