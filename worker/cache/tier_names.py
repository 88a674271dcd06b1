"""Names of blocks that are anywhere in a worker: in the GPU's pool, in host memory, or in both.

The prefix index gets them under the worker's second berth. Counts the places that hold a name, and keeps the net
changes since they were last taken.
"""

from blockyard.worker.cache.net_changes import NetChanges
from blockyard.worker.sequences.identifiers import BlockName


class AnywhereNames:
    """Counts for each name the places that hold it. Each place adds a name once and removes it once.

    The GPU is always the first place of a name. It knows whether the name is published to the index.
    """

    def __init__(self) -> None:
        self._places: dict[BlockName, int] = {}
        self._unindexed: set[BlockName] = set()
        self._changes = NetChanges[BlockName]()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._places

    def add(self, name: BlockName, *, is_indexed: bool = True) -> None:
        """Count one more place. A place that does not know `is_indexed` is never the first."""
        self._places[name] = self._places.get(name, 0) + 1
        if self._places[name] > 1:
            return
        if is_indexed:
            self._changes.add(name)
        else:
            self._unindexed.add(name)

    def remove(self, name: BlockName) -> None:
        self._places[name] -= 1
        if self._places[name]:
            return
        del self._places[name]
        if name in self._unindexed:
            self._unindexed.remove(name)
        else:
            self._changes.remove(name)

    def take_changes(self) -> tuple[tuple[BlockName, ...], tuple[BlockName, ...]]:
        """Return the names that have come (a parent before its children) and gone (a child before its parent)."""
        return self._changes.take_added(), self._changes.take_removed()
