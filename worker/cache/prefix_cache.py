"""Prefix cache: maps the names of full blocks to blocks, and collects the changes for the prefix index.

A name passes these states:

- `assign`, when the last token of its block is scheduled. Equal prompts share blocks even within one step, because each
  layer writes all KV before it attends.
- `confirm`, once that step has run: the name is published.
- `retract`, if the step failed.
- Gone, when its block is evicted.

Several blocks may hold the same name: a fully cached, aligned prompt recomputes its last block into a block of its own.
The name is published with its first copy and removed with its last.

Blocks are evicted leaf first (see reuse_odds.py), so the published names are always closed under prefixes.

With an index stride of S, the changes contain only every Sth name of a chain. Each stands for itself and the S - 1
names before it, which are held whenever it is. Of any two of these the parent still comes first and goes last.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.net_changes import NetChanges
from blockyard.worker.cache.tier_names import AnywhereNames
from blockyard.worker.sequences.identifiers import NOBODY, BlockId, BlockName, TenantId


class CacheChanges(NamedTuple):
    """The net changes of published names since they were last taken. A tuple, because each step makes one."""

    stored: tuple[BlockName, ...]
    """A parent always comes before its children."""
    removed: tuple[BlockName, ...]
    """A child always comes before its parent."""
    anywhere_stored: tuple[BlockName, ...] = ()
    """Names that are new on the GPU or in host memory. Empty where there is no host cache."""
    anywhere_removed: tuple[BlockName, ...] = ()
    roots: Mapping[BlockName, BlockName] = MappingProxyType({})
    """The first published name of the chain, for each name that is stored, and for others that came and went."""


NO_CHANGES = CacheChanges(stored=(), removed=())


class Lineage(NamedTuple):
    """Facts about a named block, for operators."""

    parent: BlockName | None
    """The name before its own in the chain. None for a prefix's first block."""
    named_at: float
    """Time on the pool's clock."""


class PrefixCache:
    """Names over a pool. It follows the pool's evictions.

    `on_lost` is called when the pool is about to reuse the last copy of a published name. It takes the block, its name
    and its parent's name.
    """

    def __init__(self, pool: BlockPool, *, anywhere: AnywhereNames | None = None) -> None:
        """`anywhere` gets published names too, where host memory is a second place for them."""
        self._pool = pool
        self._anywhere = anywhere
        self.on_lost: Callable[[BlockId, BlockName, BlockName | None], None] | None = None
        pool.on_evict = self._forget
        self._blocks: dict[BlockName, BlockId] = {}
        """The block that was named first, for each name."""
        self._copies: dict[BlockName, list[BlockId]] = {}
        """The other blocks of the few names that have several, in order."""
        self._names: dict[BlockId, BlockName] = {}
        self._parents: dict[BlockId, BlockName | None] = {}
        self._num_children: Counter[BlockName] | None = None
        """How many blocks build on each name. None until `first_alone` asks, because to count costs time."""
        self._named_at: dict[BlockId, float] = {}
        """Two dicts of plain values, which the garbage collector skips (up to CPython 3.13). One object for each block
        cost it milliseconds."""
        self._unconfirmed: set[BlockId] = set()
        self._unindexed: set[BlockId] = set()
        """Blocks with names that are not published to the index."""
        self._num_published = 0
        self._changes = NetChanges[BlockName]()
        self._roots: dict[BlockName, BlockName] = {}

    def __len__(self) -> int:
        """Return the number of published names."""
        return self._num_published

    def name(self, block: BlockId) -> BlockName | None:
        return self._names.get(block)

    def lineage(self, block: BlockId) -> Lineage | None:
        return Lineage(self._parents[block], self._named_at[block]) if block in self._parents else None

    def blocks_named(self, name: BlockName) -> list[BlockId]:
        """Return every block that holds the name, the one named first at the front."""
        first = self._blocks.get(name)
        return [] if first is None else [first, *self._copies.get(name, ())]

    def is_unconfirmed(self, block: BlockId) -> bool:
        """Return whether the step that fills the block has yet to run."""
        return block in self._unconfirmed

    def match(self, names: Sequence[BlockName]) -> list[BlockId]:
        """Return the blocks of the longest cached prefix of `names`."""
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
        is_indexed: bool = True,
        parent: BlockName | None = None,
        is_generated: bool = False,
    ) -> None:
        """Name a used block, on the account of `tenant`. Its last token has just been scheduled.

        `is_indexed` says whether the index gets the name. It is the same for every block with that name.
        `is_generated` says whether the block holds generated tokens.
        """
        assert block not in self._names, f"block {block} has a name already"
        self._names[block] = name
        self._parents[block], self._named_at[block] = parent, self._pool.now_seconds
        if self._num_children is not None and parent is not None:
            self._num_children[parent] += 1
        if self._blocks.setdefault(name, block) != block:
            self._copies.setdefault(name, []).append(block)
        self._unconfirmed.add(block)
        if not is_indexed:
            self._unindexed.add(block)
        self._pool.keep(block, tenant, name=name, is_generated=is_generated)

    def owner(self, name: BlockName) -> TenantId | None:
        """Return the tenant of the first block that got this name, or None where no block has it."""
        block = self._blocks.get(name)
        return None if block is None else self._pool.owner(block)

    def confirm(self, block: BlockId) -> None:
        """Publish the name of a block after its step has run."""
        self.confirm_all((block,))

    def confirm_all(self, blocks: Sequence[BlockId]) -> None:
        """Publish the names of these blocks where they are unconfirmed, root first. Their step has run.

        They are a chain from its first block on.
        """
        unconfirmed, root = self._unconfirmed, None
        for block in blocks:
            if block in unconfirmed:
                unconfirmed.remove(block)
                name = self._names[block]
                if not self._is_published_beside(block, name):
                    self._num_published += 1
                    is_indexed = block not in self._unindexed
                    if self._anywhere is not None:
                        self._anywhere.add(name, is_indexed=is_indexed)
                    if is_indexed:
                        root = root or self._root(blocks)
                        self._roots[name] = root
                        self._changes.add(name)

    def _root(self, blocks: Sequence[BlockId]) -> BlockName:
        """Return the first name of a chain that the index gets."""
        return next(self._names[block] for block in blocks if block not in self._unindexed)

    def _is_published_beside(self, block: BlockId, name: BlockName) -> bool:
        """Return whether a step that has run filled another block with the same name."""
        copies = self._copies.get(name)
        if copies is None:
            return False  # the usual case
        others = itertools.chain((self._blocks[name],), copies)
        return any(other != block and other not in self._unconfirmed for other in others)

    def retract_unshared(self, blocks: Iterable[BlockId]) -> None:
        """Retract the unconfirmed names of blocks that one sequence alone holds, before it releases them."""
        for block in self._unconfirmed.intersection(blocks):
            if self._pool.references(block) == 1:
                self.retract(block)

    def retract(self, block: BlockId) -> None:
        """Take an unconfirmed name back: the block does not hold what the name says."""
        if block in self._unconfirmed:
            self._forget(block)
            self._pool.discard(block)

    def flush(self) -> int:
        """Drop the names of all blocks without references, without saving them elsewhere, and return how many
        blocks."""
        on_lost, self.on_lost = self.on_lost, None
        try:
            return self._pool.flush()
        finally:
            self.on_lost = on_lost

    def _forget(self, block: BlockId) -> BlockName | None:
        """Take the block's name. Return the name where it was published and no other block has it."""
        name = self._names.pop(block)
        parent = self._parents.pop(block)
        if self._num_children is not None and parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
        del self._named_at[block]
        is_indexed = block not in self._unindexed
        if not is_indexed:
            self._unindexed.remove(block)
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
            if is_indexed:
                self._changes.remove(name)
            return name
        return None

    def first_alone(self, blocks: Sequence[BlockId]) -> int:
        """Return the index from which on no other chain builds on these blocks, which are a chain from its first block
        on. Blocks without a name are alone."""
        if self._num_children is None:
            self._num_children = self._count_children()
        is_named_after = 0
        for index in range(len(blocks) - 1, -1, -1):
            name = self._names.get(blocks[index])
            if name is not None:
                if self._num_children[name] != is_named_after:
                    return index + 1
                is_named_after = 1
        return 0

    def _count_children(self) -> Counter[BlockName]:
        return Counter(parent for parent in self._parents.values() if parent is not None)

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
        """Return the net change since the last call: a name that came and went meanwhile is left out."""
        stored, removed = self._changes.take_added(), self._changes.take_removed()
        roots: Mapping[BlockName, BlockName] = NO_CHANGES.roots
        if self._roots:
            roots, self._roots = self._roots, {}
        if self._anywhere is not None:
            return CacheChanges(stored, removed, *self._anywhere.take_changes(), roots)
        return CacheChanges(stored, removed, roots=roots) if stored or removed else NO_CHANGES

    def check_invariants(self) -> None:
        """Raise AssertionError where names, copies and counts disagree. O(blocks)."""
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
        assert self._num_children in (None, self._count_children())
        assert self._unconfirmed <= self._names.keys()
        assert self._unindexed <= self._names.keys()
