"""Shared prefixes of a step: groups of decode rows with the same first blocks, read once for the whole group
(cascade).

Prefix-aware routing gathers requests with one system prompt on one worker. That alone saves computing the prompt again,
but not reading it at each step. Groups are found by block numbers and not by block names, because attention reads by
block tables.

Owns finding the groups and the work items over what they share. Pure arithmetic in numpy: knows no backend.

Shapes: R sequences (rows), D decode rows, B blocks in the longest table. Y shared items, M members of all groups.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# Fewer rows or tokens gain less than the second launch and the merge cost.
MIN_SHARERS = 8
MIN_SHARED_TOKENS = 512
# Packed query rows of one item, as in a prefill program.
_ITEM_ROWS = 128


def members_of_item(group: int) -> int:
    """Return how many decode rows an item covers at most, where a kv head has `group` query heads."""
    return max(1, _ITEM_ROWS // group)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Groups of decode rows, each with the tokens that all of its members read first. No row is in two groups."""

    members_M: Int64Array
    """Decode rows, group after group."""
    group_sizes: tuple[int, ...]
    group_tokens: tuple[int, ...]
    """Tokens that each group shares: whole blocks, and less than any member's context. So each member has a key of its
    own."""

    @classmethod
    def none(cls) -> Self:
        return cls(members_M=np.zeros(0, dtype=np.int64), group_sizes=(), group_tokens=())

    def tokens_of_rows(self, num_decodes: int) -> Int64Array:
        """Return how many tokens each decode row shares [D], 0 for rows in no group."""
        tokens_D = np.zeros(num_decodes, dtype=np.int64)
        tokens_D[self.members_M] = np.repeat(self.group_tokens, self.group_sizes)
        return tokens_D

    def reads(self, members: int) -> int:
        """Return how many keys all items read in the shared prefixes, for each kv head. An item has at most `members`
        rows."""
        return sum(
            tokens * -(-size // members)
            for tokens, size in zip(self.group_tokens, self.group_sizes, strict=True)
        )

    def items(self, split_tokens: int, members: int) -> tuple[Int32Array, Int64Array]:
        """Return the items [Y, 5] of at most `members` rows and `split_tokens` keys, and how many splits each member
        has [M].

        An item is (first member, end member, first key, end key, split). Members are indices into `members_M`. The item
        writes each member's partial result to that row's slot number `split`. Keys are read by the first member's
        table.
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
    """Find groups of at least MIN_SHARERS decode rows with their first MIN_SHARED_TOKENS in the same blocks."""
    depth = -(-MIN_SHARED_TOKENS // block_size)
    candidates_C = np.flatnonzero(context_D > depth * block_size)
    if len(candidates_C) < MIN_SHARERS:
        return SharedPrefixes.none()
    # Only rows that share the block at this depth can share all before it. Those are compared next.
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
    """Return how many leading blocks the tables of these rows share, without the last block of the shortest context."""
    limit = (int(context_D[rows].min()) - 1) // block_size
    tables = table_RB[rows, :limit]
    differs = np.flatnonzero((tables != tables[0]).any(axis=0))
    return int(differs[0]) if len(differs) else limit
