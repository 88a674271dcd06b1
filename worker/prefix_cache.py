"""Which block holds which prefix: the names of blocks, and the news of them for the index.

The life of a name: `assign` when the last token of its block is scheduled, so that equal prompts share even within one
step (each layer writes all KV before it attends); `confirm` once that step has run, which publishes it; `retract` if
the step failed; gone when its block is evicted. Several blocks may hold the same name (a fully cached, aligned prompt
recomputes its last block into one of its own): the name is published at its first copy and removed with its last.

Blocks are evicted leaf first (see BlockPool.release), so what is published is always closed under prefixes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from blockyard.worker.block_pool import BlockPool
from blockyard.worker.sequence import BlockId, BlockName


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """The net difference of published names since the last look."""

    stored: tuple[BlockName, ...]
    """A parent always before its children."""
    removed: tuple[BlockName, ...]
    """A child always before its parent."""


class PrefixCache:
    """Names over a pool, whose evictions it follows."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        pool.on_evict = self._forget
        self._copies: dict[BlockName, dict[BlockId, None]] = {}
        self._names: dict[BlockId, BlockName] = {}
        self._unconfirmed: set[BlockId] = set()
        self._published: dict[BlockName, int] = {}
        self._changes: dict[BlockName, bool] = {}

    def __len__(self) -> int:
        """Published names."""
        return len(self._published)

    def name(self, block: BlockId) -> BlockName | None:
        return self._names.get(block)

    def is_unconfirmed(self, block: BlockId) -> bool:
        """Whether the step that fills the block has yet to run."""
        return block in self._unconfirmed

    def match(self, names: Sequence[BlockName]) -> list[BlockId]:
        """The blocks of the longest cached prefix of `names`."""
        blocks = []
        for name in names:
            copies = self._copies.get(name)
            if not copies:
                break
            blocks.append(next(iter(copies)))
        return blocks

    def assign(self, block: BlockId, name: BlockName) -> None:
        """Names a used block whose last token has just been scheduled."""
        assert block not in self._names, f"block {block} has a name already"
        self._names[block] = name
        self._copies.setdefault(name, {})[block] = None
        self._unconfirmed.add(block)
        self._pool.keep(block)

    def confirm(self, block: BlockId) -> None:
        """The step that filled the block has run: its name may be published."""
        if block not in self._unconfirmed:
            return
        self._unconfirmed.remove(block)
        name = self._names[block]
        self._published[name] = self._published.get(name, 0) + 1
        if self._published[name] == 1:
            self._record(name, stored=True)

    def retract(self, block: BlockId) -> None:
        """Takes an unconfirmed name back: what the block holds is not what the name says."""
        if block in self._unconfirmed:
            self._forget(block)
            self._pool.discard(block)

    def _forget(self, block: BlockId) -> None:
        name = self._names.pop(block)
        copies = self._copies[name]
        del copies[block]
        if not copies:
            del self._copies[name]
        if block in self._unconfirmed:
            self._unconfirmed.remove(block)
            return
        self._published[name] -= 1
        if not self._published[name]:
            del self._published[name]
            self._record(name, stored=False)

    def _record(self, name: BlockName, *, stored: bool) -> None:
        if self._changes.get(name) is (not stored):
            del self._changes[name]
        else:
            self._changes[name] = stored

    def take_changes(self) -> CacheChanges:
        """What was published and removed since the last call."""
        changes, self._changes = self._changes, {}
        return CacheChanges(
            stored=tuple(name for name, stored in changes.items() if stored),
            removed=tuple(name for name, stored in changes.items() if not stored),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError where names, copies and counts disagree. O(blocks)."""
        assert sum(len(copies) for copies in self._copies.values()) == len(self._names)
        counts: dict[BlockName, int] = {}
        for block, name in self._names.items():
            assert block in self._copies[name]
            if block not in self._unconfirmed:
                counts[name] = counts.get(name, 0) + 1
        assert counts == self._published
        assert self._unconfirmed <= self._names.keys()
