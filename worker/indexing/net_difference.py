"""How a worker's cache differs from what the prefix index has been told, tier by tier. Pure.

Owns the order that keeps every batch prefix-closed, and the GPU's names within those anywhere. Does not own sending:
see publisher.py.
"""

from collections.abc import Iterable
from itertools import islice

from blockyard.proto.index.contract import Batch


class NetDifference:
    """What the cache holds, and how that differs from what the index has been told. Pure.

    Order is what keeps every batch prefix-closed. Each dict is ordered by a name's *last* change: a parent is
    stored before its child and goes after it, so `held` and `added` run root-to-leaf, `removed` leaf-to-root.
    Memory is bounded by the pool: `held` is the cache, `removed` is part of what the index was told.
    """

    def __init__(self) -> None:
        self.held: dict[bytes, None] = {}
        self.added: dict[bytes, None] = {}
        self.removed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self.added) + len(self.removed)

    def record(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Removals first: a step evicts before it reuses. A name both removed and stored ends up held."""
        for name in removed:
            if name in self.held:
                del self.held[name]
                _change(name, todo=self.removed, undone=self.added)
        for name in stored:
            if name not in self.held:
                self.held[name] = None
                _change(name, todo=self.added, undone=self.removed)

    def take_removed(self, limit: int) -> tuple[bytes, ...]:
        """Up to `limit` names; the caller answers for telling the index."""
        return _take(self.removed, limit)

    def take_added(self, limit: int) -> tuple[bytes, ...]:
        """The same, to be told once no removal is left."""
        return _take(self.added, limit)

    def restart(self) -> None:
        """The index knows nothing: everything held is to be told."""
        self.added, self.removed = dict(self.held), {}


class TieredDifference:
    """One difference for names on the GPU, one for names on the GPU or in host memory.

    The second is told only where the berth has a number for it. A batch fills up in the order GPU's removals,
    removals anywhere, additions anywhere, GPU's additions: so whatever the limit cuts off, a name that the index
    has on the GPU it has anywhere too.
    """

    def __init__(self) -> None:
        self.on_gpu = NetDifference()
        self.anywhere = NetDifference()
        self.tells_anywhere = False

    def __len__(self) -> int:
        return len(self.on_gpu) + (len(self.anywhere) if self.tells_anywhere else 0)

    def take(self, limit: int, *, sequence: int) -> Batch:
        """The next batch, of up to `limit` names in all."""
        anywhere = self.anywhere if self.tells_anywhere else NetDifference()
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

    def restart(self, *, tells_anywhere: bool) -> None:
        """The index knows nothing under the new berth."""
        self.tells_anywhere = tells_anywhere
        self.on_gpu.restart()
        self.anywhere.restart()


def _take(names: dict[bytes, None], limit: int) -> tuple[bytes, ...]:
    taken = tuple(islice(names, limit))
    for name in taken:
        del names[name]
    return taken


def _change(name: bytes, *, todo: dict[bytes, None], undone: dict[bytes, None]) -> None:
    """Cancels the opposite change if the index has not been told of it, else waits to be told."""
    if name in undone:
        del undone[name]
    else:
        todo[name] = None
