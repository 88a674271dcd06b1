"""Which names a worker asks the prefix index for when it renews its lease: does the index say what it was told?

Owns the going round: some names each time, all that is held sooner or later. It finds what no sequence number can:
values overwritten, keys deleted, news lost behind a confirmed write. Does not own asking, nor what follows from the
answer (publisher.py). Pure.
"""

from collections import deque
from collections.abc import Iterable

from blockyard.worker.indexing.net_difference import NetDifference

MAX_HELD = 256
"""Names of one tier in one check: 0.3 ms of Redis."""
MAX_GONE = 64
REMEMBERED_GONE = 1024


class SpotChecks:
    """Of one tier."""

    def __init__(self) -> None:
        self._round: deque[bytes] = deque()
        self._gone: deque[bytes] = deque(maxlen=REMEMBERED_GONE)

    def removed(self, names: Iterable[bytes]) -> None:
        """The index has confirmed it."""
        self._gone.extend(names)

    def restart(self) -> None:
        """Under a new berth nothing has been told yet."""
        self._round.clear()
        self._gone.clear()

    def take(self, difference: NetDifference) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Names that the index must know of, and names that it must not, while nothing is on its way to it."""
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
