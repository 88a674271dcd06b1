"""The net difference of a set of names since the last look: what came and went meanwhile is not told."""

from blockyard.worker.sequences.identifiers import BlockName


class NetChanges:
    """In order of each name's last change."""

    def __init__(self) -> None:
        self._changes: dict[BlockName, bool] = {}

    def store(self, name: BlockName) -> None:
        if self._changes.get(name) is False:
            del self._changes[name]
        else:
            self._changes[name] = True

    def remove(self, name: BlockName) -> None:
        if self._changes.get(name):
            del self._changes[name]
        else:
            self._changes[name] = False

    def take(self) -> tuple[tuple[BlockName, ...], tuple[BlockName, ...]]:
        """Names that have come and names that have gone."""
        if not self._changes:
            return (), ()
        changes, self._changes = self._changes, {}
        stored = tuple([name for name, is_stored in changes.items() if is_stored])
        if len(stored) == len(changes):
            return stored, ()
        return stored, tuple([name for name, is_stored in changes.items() if not is_stored])
