"""Net changes of a set of names: an addition and a removal that both wait to be taken cancel each other.

Does not know which names the set holds.
"""

from itertools import islice
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=bytes)


class NetChanges(Generic[Name]):
    """Names added to a set and removed from it since they were last taken.

    Each dict is in the order of a name's last change. Where a parent comes before its child and goes after it, `added`
    runs root to leaf and `removed` leaf to root.
    """

    def __init__(self) -> None:
        self.added: dict[Name, None] = {}
        self.removed: dict[Name, None] = {}

    def __len__(self) -> int:
        return len(self.added) + len(self.removed)

    def add(self, name: Name) -> None:
        if name in self.removed:
            del self.removed[name]
        else:
            self.added[name] = None

    def remove(self, name: Name) -> None:
        if name in self.added:
            del self.added[name]
        else:
            self.removed[name] = None

    def take_added(self, limit: int | None = None) -> tuple[Name, ...]:
        """Return up to `limit` added names, or all, and forget them."""
        return _take(self.added, limit) if self.added else ()

    def take_removed(self, limit: int | None = None) -> tuple[Name, ...]:
        """Return up to `limit` removed names, or all, and forget them."""
        return _take(self.removed, limit) if self.removed else ()


def _take(names: dict[Name, None], limit: int | None) -> tuple[Name, ...]:
    taken = tuple(islice(names, limit))
    if len(taken) == len(names):
        names.clear()
    else:
        for name in taken:
            del names[name]
    return taken
