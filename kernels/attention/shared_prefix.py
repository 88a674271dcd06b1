"""Which decode rows of a step read the same blocks first, so that these are read once for all of them (cascade).

Prefix-aware routing gathers requests with one system prompt on one worker; that alone saves computing it again, and
nothing of reading it at each step. Rows share what they share by block numbers, not by names: the tables are the truth.

Owns finding the groups and the work items over what they share. Knows no backend: pure arithmetic in numpy.

Shapes: R sequences (rows), D decode rows, B blocks in the longest table, Y shared items, M members of all groups.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# Fewer rows, or fewer tokens, gain less than the second launch and the merge cost.
MIN_SHARERS = 8
MIN_SHARED_TOKENS = 512
# Packed query rows of one item: those of a prefill program.
_ITEM_ROWS = 128


def members_of_item(group: int) -> int:
    """How many decode rows, of so many query heads for each kv head, one program attends for."""
    return max(1, _ITEM_ROWS // group)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Groups of decode rows, each with the tokens that all of its members read first. No row is in two groups."""

    members_M: Int64Array
    """Decode rows, group after group."""
    group_sizes: tuple[int, ...]
    group_tokens: tuple[int, ...]
    """Whole blocks, and less than any member's context: each member has a key of its own left."""

    @classmethod
    def none(cls) -> Self:
        return cls(members_M=np.zeros(0, dtype=np.int64), group_sizes=(), group_tokens=())

    def tokens_of_rows(self, num_decodes: int) -> Int64Array:
        """What each decode row shares, 0 for those of no group. Shape [D]."""
        tokens_D = np.zeros(num_decodes, dtype=np.int64)
        tokens_D[self.members_M] = np.repeat(self.group_tokens, self.group_sizes)
        return tokens_D

    def reads(self, members: int) -> int:
        """Keys that items of so many members read over what is shared, for each kv head."""
        return sum(
            tokens * -(-size // members)
            for tokens, size in zip(self.group_tokens, self.group_sizes, strict=True)
        )

    def items(self, split_tokens: int, members: int) -> tuple[Int32Array, Int64Array]:
        """The items [Y, 5] of so many members and keys at most, and how many splits each member has [M].

        An item is (first member, end member, first key, end key, split): it leaves the partial result of each of its
        members in that member's slot of that number. Keys are read by the first member's table.
        """
        items: list[tuple[int, int, int, int, int]] = []
        splits: list[int] = []
        first = 0
        for size, tokens in zip(self.group_sizes, self.group_tokens, strict=True):
            bounds = [*range(0, tokens, split_tokens), tokens]
            items += [
                (member, min(member + members, first + size), begin, end, split)
                for split, (begin, end) in enumerate(pairwise(bounds))
                for member in range(first, first + size, members)
            ]
            splits += [len(bounds) - 1] * size
            first += size
        return np.array(items, dtype=np.int32).reshape(-1, 5), np.array(splits, dtype=np.int64)


def find_shared_prefixes(table_RB: Int32Array, context_D: Int64Array, block_size: int) -> SharedPrefixes:
    """Groups of MIN_SHARERS decode rows at least whose first MIN_SHARED_TOKENS lie in the same blocks."""
    depth = -(-MIN_SHARED_TOKENS // block_size)
    candidates_C = np.flatnonzero(context_D > depth * block_size)
    if len(candidates_C) < MIN_SHARERS:
        return SharedPrefixes.none()
    # Who shares the block at this depth may share all before it, which is looked at then; nobody else can.
    blocks_C = table_RB[candidates_C, depth - 1]
    order_C = np.argsort(blocks_C, kind="stable")
    firsts = np.flatnonzero(np.diff(blocks_C[order_C], prepend=-1))
    alike = np.diff(firsts, append=len(order_C))
    members, sizes, tokens = [], [], []
    for group in np.flatnonzero(alike >= MIN_SHARERS):
        rows = candidates_C[order_C[firsts[group] : firsts[group] + alike[group]]]
        shared = _blocks_in_common(table_RB, context_D, rows, block_size)
        if shared >= depth:
            members.append(rows)
            sizes.append(len(rows))
            tokens.append(shared * block_size)
    if not members:
        return SharedPrefixes.none()
    return SharedPrefixes(
        members_M=np.concatenate(members), group_sizes=tuple(sizes), group_tokens=tuple(tokens)
    )


def _blocks_in_common(table_RB: Int32Array, context_D: Int64Array, rows: Int64Array, block_size: int) -> int:
    """Leading blocks that the tables of these rows have in common, the last block of the shortest context left out."""
    limit = (int(context_D[rows].min()) - 1) // block_size
    tables = table_RB[rows, :limit]
    differs = np.flatnonzero((tables != tables[0]).any(axis=0))
    return int(differs[0]) if len(differs) else limit
