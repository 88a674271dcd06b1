"""Net difference between a worker's cache and what it has published to the prefix index, tier by tier. Pure.

Owns the order that keeps every batch prefix-closed, and each name on the GPU listed as anywhere too. Does not send: see
publisher.py.
"""

from collections.abc import Iterable

from blockyard.proto.index.contract import Batch
from blockyard.worker.cache.net_changes import NetChanges


class NetDifference(NetChanges[bytes]):
    """The names that the cache holds, and the net changes that are not published yet.

    The order of changes keeps every batch prefix-closed. Memory is bounded by the pool: `held` is the cache, and
    `removed` is a part of what was published.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[bytes, None] = {}

    def record(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Add the changes of a step, removals first: a step evicts before it reuses.

        A name both removed and stored ends up held. Repeated reports change nothing.
        """
        for name in removed:
            if name in self.held:
                del self.held[name]
                self.remove(name)
        for name in stored:
            if name not in self.held:
                self.held[name] = None
                self.add(name)

    def restart(self) -> None:
        """Mark all names that are held as unpublished: the index knows nothing."""
        self.added, self.removed = dict(self.held), {}


class TieredDifference:
    """One difference for names on the GPU, one for names on the GPU or in host memory.

    The second is published only where the berth has a number for it. A batch takes in this order: removals on the GPU,
    removals anywhere, additions anywhere, additions on the GPU. So wherever the limit cuts, a name that the index has
    on the GPU it has anywhere too.
    """

    def __init__(self) -> None:
        self.on_gpu = NetDifference()
        self.anywhere = NetDifference()
        self.publishes_anywhere = False

    def __len__(self) -> int:
        return len(self.on_gpu) + (len(self.anywhere) if self.publishes_anywhere else 0)

    def take(self, limit: int, *, sequence: int) -> Batch:
        """Return the next batch, of up to `limit` names in all."""
        anywhere = self.anywhere if self.publishes_anywhere else NetDifference()
        removed = self.on_gpu.take_removed(limit)
        left = limit - len(removed)
        anywhere_removed = anywhere.take_removed(left)
        left -= len(anywhere_removed)
        anywhere_added = anywhere.take_added(left)
        return Batch(
            sequence=sequence,
            removed=removed,
            anywhere_removed=anywhere_removed,
            anywhere_added=anywhere_added,
            added=self.on_gpu.take_added(left - len(anywhere_added)),
        )

    def restart(self, *, publishes_anywhere: bool) -> None:
        """Mark all names as unpublished: the index knows nothing under the new berth."""
        self.publishes_anywhere = publishes_anywhere
        self.on_gpu.restart()
        self.anywhere.restart()
