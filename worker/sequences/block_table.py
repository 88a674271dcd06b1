"""Block table: the map from a sequence's logical blocks to physical blocks, as a list with a version.

Owns the list and every way to change it. Does not count references or move contents (cache/block_tables.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from blockyard.worker.sequences.identifiers import BlockId


class BlockTable(Sequence[BlockId]):
    """Entry i is the physical block of the sequence's logical block i. Readers use it like a list.

    A reader that keeps a copy compares `version` with `is`. Under one version the table only grows, and only its last
    entry may be replaced. Every other change makes a new version, which no other table has.
    """

    __slots__ = ("_blocks", "blocks", "version")

    def __init__(self, blocks: Iterable[BlockId] = ()) -> None:
        self.assign(blocks)

    def assign(self, blocks: Iterable[BlockId]) -> None:
        """Hold these blocks instead, under a new version."""
        self._blocks = list(blocks)
        self.blocks: Sequence[BlockId] = self._blocks
        """The list itself, for loops in which a method call is too slow. Only this class changes it."""
        self.version = object()

    def clear(self) -> None:
        """Hold no block, under a new version."""
        self.assign(())

    def extend(self, blocks: Iterable[BlockId]) -> None:
        """Add blocks at the end. The version stays."""
        self._blocks.extend(blocks)

    def replace(self, index: int, block: BlockId) -> None:
        """Replace entry `index`, from 0 on. The version stays only for the last entry. Raises IndexError."""
        self._blocks[index] = block
        if index != len(self._blocks) - 1:
            self.version = object()

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> BlockId: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockId]: ...
    def __getitem__(self, index: int | slice) -> BlockId | list[BlockId]:
        return self._blocks[index]

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._blocks)

    def __reversed__(self) -> Iterator[BlockId]:
        return reversed(self._blocks)

    def __repr__(self) -> str:
        return f"BlockTable({self._blocks})"
