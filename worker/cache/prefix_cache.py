"""Which block holds which prefix: the names of blocks, and the news of them for the index.

The life of a name: `assign` when the last token of its block is scheduled, so that equal prompts share even within one
step (each layer writes all KV before it attends); `confirm` once that step has run, which publishes it; `retract` if
the step failed; gone when its block is evicted. Several blocks may hold the same name (a fully cached, aligned prompt
recomputes its last block into one of its own): the name is published at its first copy and removed with its last.

Blocks are evicted leaf first (see BlockPool.release), so what is published is always closed under prefixes.

With an index stride of S the news tell of every S-th name of a chain alone: each stands for itself and the S - 1 before
it. Those are held whenever it is, and of any two that are told the parent still comes first and goes last.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.net_changes import NetChanges
from blockyard.worker.cache.tiers import AnywhereNames
from blockyard.worker.sequences.identifiers import NOBODY, BlockId, BlockName, TenantId


class CacheChanges(NamedTuple):
    """The net difference of published names since the last look. A tuple, because one is made each step."""

    stored: tuple[BlockName, ...]
    """A parent always before its children."""
    removed: tuple[BlockName, ...]
    """A child always before its parent."""
    anywhere_stored: tuple[BlockName, ...] = ()
    """The same of names on the GPU or in host memory; empty where there is no host cache."""
    anywhere_removed: tuple[BlockName, ...] = ()


NO_CHANGES = CacheChanges(stored=(), removed=())


class Lineage(NamedTuple):
    """What operators are told of a named block."""

    parent: BlockName | None
    """The name before its own in the chain; None of a prefix's first block."""
    named_at: float
    """By the clock that `now_seconds` follows."""


class PrefixCache:
    """Names over a pool, whose evictions it follows.

    `on_lost` is called with a block, its name and its parent's when the pool is about to reuse the last copy of a
    published name.
    """

    def __init__(self, pool: BlockPool, *, anywhere: AnywhereNames | None = None) -> None:
        """`anywhere` hears of published names too, where host memory is a second place for them."""
        self._pool = pool
        self._anywhere = anywhere
        self.on_lost: Callable[[BlockId, BlockName, BlockName | None], None] | None = None
        pool.on_evict = self._forget
        self._blocks: dict[BlockName, BlockId] = {}
        """The longest named block of each name."""
        self._copies: dict[BlockName, list[BlockId]] = {}
        """The other blocks of the few names that have several, in order."""
        self._names: dict[BlockId, BlockName] = {}
        self._parents: dict[BlockId, BlockName | None] = {}
        self._named_at: dict[BlockId, float] = {}
        """Two dicts of plain values, which the garbage collector passes over (up to CPython 3.13), where an object for
        each block took it milliseconds."""
        self.now_seconds = 0.0
        """What time it is. Whoever turns the engine says so with each step: this asks no clock."""
        self._unconfirmed: set[BlockId] = set()
        self._untold: set[BlockId] = set()
        """Blocks whose names the index is not to know."""
        self._num_published = 0
        self._changes = NetChanges[BlockName]()

    def __len__(self) -> int:
        """Published names."""
        return self._num_published

    def name(self, block: BlockId) -> BlockName | None:
        return self._names.get(block)

    def lineage(self, block: BlockId) -> Lineage | None:
        return Lineage(self._parents[block], self._named_at[block]) if block in self._parents else None

    def blocks_named(self, name: BlockName) -> list[BlockId]:
        """Every block that holds it, the longest named first."""
        first = self._blocks.get(name)
        return [] if first is None else [first, *self._copies.get(name, ())]

    def is_unconfirmed(self, block: BlockId) -> bool:
        """Whether the step that fills the block has yet to run."""
        return block in self._unconfirmed

    def match(self, names: Sequence[BlockName]) -> list[BlockId]:
        """The blocks of the longest cached prefix of `names`."""
        blocks, block_of = [], self._blocks.get
        for name in names:
            block = block_of(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def assign(
        self,
        block: BlockId,
        name: BlockName,
        tenant: TenantId = NOBODY,
        is_told: bool = True,
        parent: BlockName | None = None,
    ) -> None:
        """Names a used block whose last token has just been scheduled, on the account of `tenant`. `is_told` says
        whether the index is to know the name; it is the same for every copy."""
        assert block not in self._names, f"block {block} has a name already"
        self._names[block] = name
        self._parents[block], self._named_at[block] = parent, self.now_seconds
        if self._blocks.setdefault(name, block) != block:
            self._copies.setdefault(name, []).append(block)
        self._unconfirmed.add(block)
        if not is_told:
            self._untold.add(block)
        self._pool.keep(block, tenant)

    def owner(self, name: BlockName) -> TenantId | None:
        """On whose account the longest named block of a name is."""
        block = self._blocks.get(name)
        return None if block is None else self._pool.owner(block)

    def confirm(self, block: BlockId) -> None:
        """The step that filled the block has run: its name may be published."""
        self.confirm_all((block,))

    def confirm_all(self, blocks: Iterable[BlockId]) -> None:
        """The same for those of the blocks that are unconfirmed, root first."""
        unconfirmed = self._unconfirmed
        for block in blocks:
            if block in unconfirmed:
                unconfirmed.remove(block)
                name = self._names[block]
                if not self._is_published_beside(block, name):
                    self._num_published += 1
                    is_told = block not in self._untold
                    if self._anywhere is not None:
                        self._anywhere.add(name, is_told=is_told)
                    if is_told:
                        self._changes.add(name)

    def _is_published_beside(self, block: BlockId, name: BlockName) -> bool:
        """Whether a step that has run filled another block with the same."""
        copies = self._copies.get(name)
        if copies is None:
            return False  # as nearly always
        others = itertools.chain((self._blocks[name],), copies)
        return any(other != block and other not in self._unconfirmed for other in others)

    def retract_unshared(self, blocks: Iterable[BlockId]) -> None:
        """Retracts those of the blocks that one sequence alone holds, which is about to release them."""
        for block in self._unconfirmed.intersection(blocks):
            if self._pool.references(block) == 1:
                self.retract(block)

    def retract(self, block: BlockId) -> None:
        """Takes an unconfirmed name back: what the block holds is not what the name says."""
        if block in self._unconfirmed:
            self._forget(block)
            self._pool.discard(block)

    def flush(self) -> int:
        """Forgets the names of all blocks that nobody holds, and saves none of them elsewhere: how many blocks."""
        on_lost, self.on_lost = self.on_lost, None
        try:
            return self._pool.flush()
        finally:
            self.on_lost = on_lost

    def _forget(self, block: BlockId) -> None:
        name = self._names.pop(block)
        parent = self._parents.pop(block)
        del self._named_at[block]
        is_told = block not in self._untold
        if not is_told:
            self._untold.remove(block)
        is_published_beside = self._is_published_beside(block, name)
        self._drop_block(block, name)
        if block in self._unconfirmed:
            self._unconfirmed.remove(block)
        elif not is_published_beside:
            self._num_published -= 1
            if self.on_lost is not None:
                self.on_lost(block, name, parent)
            if self._anywhere is not None:
                self._anywhere.remove(name)
            if is_told:
                self._changes.remove(name)

    def _drop_block(self, block: BlockId, name: BlockName) -> None:
        copies = self._copies.get(name)
        if copies is None:
            del self._blocks[name]
            return
        if self._blocks[name] == block:
            self._blocks[name] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[name]

    def take_changes(self) -> CacheChanges:
        """What was published and removed since the last call."""
        stored, removed = self._changes.take_added(), self._changes.take_removed()
        if self._anywhere is not None:
            return CacheChanges(stored, removed, *self._anywhere.take_changes())
        return CacheChanges(stored, removed) if stored or removed else NO_CHANGES

    def check_invariants(self) -> None:
        """Raises AssertionError where names, copies and counts disagree. O(blocks)."""
        assert self._copies.keys() <= self._blocks.keys()
        assert all(self._copies.values())
        assert len(self._blocks) + sum(map(len, self._copies.values())) == len(self._names)
        for name, copies in self._copies.items():
            assert len({self._blocks[name], *copies}) == 1 + len(copies)
            assert all(self._names[block] == name for block in copies)
        assert all(self._names[block] == name for name, block in self._blocks.items())
        published = {name for block, name in self._names.items() if block not in self._unconfirmed}
        assert len(published) == self._num_published
        assert self._names.keys() == self._parents.keys() == self._named_at.keys()
        assert self._unconfirmed <= self._names.keys()
        assert self._untold <= self._names.keys()
