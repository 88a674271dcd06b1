"""Spot checks: names that a worker looks up in the prefix index at each renewal of its lease.

Owns the rotation: some names each time, all held names sooner or later. It finds what no sequence number can: values
overwritten, keys deleted, changes lost behind a confirmed write. Does not own the look-up, or what follows from the
answer (publisher.py). Pure.
"""

from collections import deque
from collections.abc import Iterable

from blockyard.worker.indexing.net_difference import NetDifference

MAX_HELD = 256
"""Names of one tier in one check. They take 0.3 ms of Redis."""
MAX_GONE = 64
REMEMBERED_GONE = 1024


class SpotChecks:
    """The checks of one tier."""

    def __init__(self) -> None:
        self._round: deque[bytes] = deque()
        self._gone: deque[bytes] = deque(maxlen=REMEMBERED_GONE)

    def removed(self, names: Iterable[bytes]) -> None:
        """Note names that the index has confirmed as removed."""
        self._gone.extend(names)

    def restart(self) -> None:
        """Forget the names to check: under a new berth nothing is published yet."""
        self._round.clear()
        self._gone.clear()

    def take(self, difference: NetDifference) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return names that the index must hold, and names that it must not. Call it while no batch is in flight."""
        if not self._round:
            self._round.extend(difference.held)
        held = _take(self._round, MAX_HELD)
        gone = _take(self._gone, MAX_GONE)
        return (
            tuple(name for name in held if name in difference.held and name not in difference.added),
            tuple(name for name in gone if name not in difference.held and name not in difference.removed),
        )


def _take(names: deque[bytes], limit: int) -> list[bytes]:
    return [names.popleft() for _ in range(min(limit, len(names)))]
