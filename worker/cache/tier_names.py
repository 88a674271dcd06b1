"""Names of blocks that are anywhere in a worker: in the GPU's pool, in host memory, or in both.

The prefix index gets them under the second number of the worker's berth. Counts the tiers that hold a name, and keeps
the net changes since they were last taken.
"""

from blockyard.worker.cache.net_changes import NetChanges
from blockyard.worker.sequences.identifiers import BlockName


class AnywhereNames:
    """Counts for each name the tiers that hold it. Each tier adds a name once and removes it once.

    The first tier of a name knows whether the name is published to the index: the GPU, or host memory for a block that
    came from another worker.
    """

    def __init__(self) -> None:
        self._num_tiers: dict[BlockName, int] = {}
        self._unindexed: set[BlockName] = set()
        self._changes = NetChanges[BlockName]()

    def __len__(self) -> int:
        return len(self._num_tiers)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._num_tiers

    def add(self, name: BlockName, *, is_indexed: bool = True) -> None:
        """Count one more tier. A tier that does not know `is_indexed` is never the first."""
        self._num_tiers[name] = self._num_tiers.get(name, 0) + 1
        if self._num_tiers[name] > 1:
            return
        if is_indexed:
            self._changes.add(name)
        else:
            self._unindexed.add(name)

    def remove(self, name: BlockName) -> None:
        self._num_tiers[name] -= 1
        if self._num_tiers[name]:
            return
        del self._num_tiers[name]
        if name in self._unindexed:
            self._unindexed.remove(name)
        else:
            self._changes.remove(name)

    def take_changes(self) -> tuple[tuple[BlockName, ...], tuple[BlockName, ...]]:
        """Return the names that have come (a parent before its children) and gone (a child before its parent)."""
        return self._changes.take_added(), self._changes.take_removed()
