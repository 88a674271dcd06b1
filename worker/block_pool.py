"""Who holds which KV block: reference counts and two queues of blocks that nobody holds.

Every block is in exactly one of three states, and `free + cached + used == total` at every moment:

    free    nobody holds it and nothing can be found in it
    cached  nobody holds it, but the prefix cache can find it again: evicted, oldest first, once no free one is left
    used    held by one sequence or more

The pool knows neither names nor tensors: the prefix cache says which blocks are worth keeping, and hears of evictions.
All operations are O(1) a block: an OrderedDict is a linked list that pops its oldest without scanning.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from blockyard.worker.sequence import BlockId


class BlockState(Enum):
    FREE = "free"
    CACHED = "cached"
    USED = "used"


class NoFreeBlocks(Exception):
    """The pool cannot give so many blocks now; nothing was changed."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1. `on_evict` is called with a cached block just before it is given away."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.on_evict: Callable[[BlockId], None] = lambda block: None
        self._references = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        self._free = OrderedDict[BlockId, None].fromkeys(self.blocks())
        self._cached = OrderedDict[BlockId, None]()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_allocatable

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` could give now: the free and the cached."""
        return len(self._free) + len(self._cached)

    def blocks(self) -> Iterable[BlockId]:
        """Every block, in order."""
        return map(BlockId, range(self.num_blocks))

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def state(self, block: BlockId) -> BlockState:
        if self._references[block]:
            return BlockState.USED
        return BlockState.CACHED if self._kept[block] else BlockState.FREE

    def allocate(self, count: int) -> list[BlockId]:
        """Takes `count` blocks with one reference each: free ones first, then the longest unused of the cached.

        Raises NoFreeBlocks, without any side effect, where there are not as many.
        """
        free, cached, references = self._free, self._cached, self._references
        if count > len(free) + len(cached):
            raise NoFreeBlocks(f"{count} blocks wanted, {self.num_allocatable} can be had")
        blocks = []
        for _ in range(count):
            block = free.popitem(last=False)[0] if free else self._evict()
            references[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> BlockId:
        block = self._cached.popitem(last=False)[0]
        self._kept[block] = 0
        self.num_evictions += 1
        self.on_evict(block)
        return block

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Adds a reference to blocks that are used or cached."""
        references = self._references
        for block in blocks:
            if not references[block]:
                assert self._kept[block], "a free block holds nothing to share"
                del self._cached[block]
            references[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Gives back one reference of each block, the last of the list first.

        So a sequence's tail is evicted before its head, and what stays cached is always a prefix.
        """
        references = self._references
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, "released more often than taken"
            references[block] = left
            if not left:
                (self._cached if self._kept[block] else self._free)[block] = None

    def keep(self, block: BlockId) -> None:
        """Marks a used block as worth finding again: unreferenced it will be cached, not free."""
        assert self._references[block], "only a used block can become worth keeping"
        self._kept[block] = 1

    def discard(self, block: BlockId) -> None:
        """Takes `keep` back; an unreferenced block turns from cached to free."""
        self._kept[block] = 0
        if not self._references[block] and block in self._cached:
            del self._cached[block]
            self._free[block] = None

    def snapshot(self) -> tuple[list[int], bytes]:
        """Copies of every block's references and of whether it is kept."""
        return list(self._references), bytes(self._kept)

    def check_invariants(self) -> None:
        """Raises AssertionError where the pool contradicts itself. O(blocks)."""
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks
        for block, references in zip(self.blocks(), self._references, strict=True):
            places = (references > 0) + (block in self._free) + (block in self._cached)
            assert references >= 0, f"block {block} has {references} references"
            assert places == 1, f"block {block} is in {places} states"
            assert block not in self._cached or self._kept[block], f"block {block} is cached without a name"
            assert block not in self._free or not self._kept[block], f"block {block} is free with a name"
