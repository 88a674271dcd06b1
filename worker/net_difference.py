"""How the cache differs from what the prefix index has been told. Pure.

Owns the order that keeps every batch prefix-closed. Does not own sending: see publisher.py.
"""

from collections.abc import Iterable
from itertools import islice


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

    def take(self, limit: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Up to `limit` names, all removals before any addition; the caller answers for telling the index."""
        removed = tuple(islice(self.removed, limit))
        added = tuple(islice(self.added, limit - len(removed)))
        for name in removed:
            del self.removed[name]
        for name in added:
            del self.added[name]
        return removed, added

    def restart(self) -> None:
        """The index knows nothing: everything held is to be told."""
        self.added, self.removed = dict(self.held), {}


def _change(name: bytes, *, todo: dict[bytes, None], undone: dict[bytes, None]) -> None:
    """Cancels the opposite change if the index has not been told of it, else waits to be told."""
    if name in undone:
        del undone[name]
    else:
        todo[name] = None
