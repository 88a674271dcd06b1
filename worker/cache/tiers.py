"""Names of blocks that are anywhere in a worker: in the GPU's pool, in host memory, or in both.

What the prefix index is told under the worker's second berth. Counts places, and keeps the net difference since the
last look.
"""

from blockyard.worker.cache.net_changes import NetChanges
from blockyard.worker.sequences.identifiers import BlockName


class AnywhereNames:
    """A name is added once by each place that holds it, and removed as often. It comes to the GPU first, which knows
    whether the index is to be told of it."""

    def __init__(self) -> None:
        self._places: dict[BlockName, int] = {}
        self._untold: set[BlockName] = set()
        self._changes = NetChanges[BlockName]()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._places

    def add(self, name: BlockName, *, is_told: bool = True) -> None:
        """A place that does not know whether the name `is_told` never is its first."""
        self._places[name] = self._places.get(name, 0) + 1
        if self._places[name] > 1:
            return
        if is_told:
            self._changes.add(name)
        else:
            self._untold.add(name)

    def remove(self, name: BlockName) -> None:
        self._places[name] -= 1
        if self._places[name]:
            return
        del self._places[name]
        if name in self._untold:
            self._untold.remove(name)
        else:
            self._changes.remove(name)

    def take_changes(self) -> tuple[tuple[BlockName, ...], tuple[BlockName, ...]]:
        """Names that have come (a parent before its children) and gone (a child before its parent)."""
        return self._changes.take_added(), self._changes.take_removed()
