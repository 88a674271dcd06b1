"""Suffix index: where the last tokens of a sequence occurred before in it. What followed there is the draft.

For each order there is a hash table from runs of so many tokens to the position after their last occurrence. A table
keeps positions alone, and every hit is compared with the tokens. So memory is bounded, a new token takes constant time,
and a collision only hides an occurrence.
"""

from array import array

import numpy as np
import numpy.typing as npt

ORDERS = (6, 2)
"""Lengths of runs that are looked up, in this order."""
LONGEST_MATCH = 32
"""A match is compared up to this many tokens."""
MAX_TABLE_BITS = 15
MIN_TABLE_BITS = 8
_VECTOR_FROM = 64
"""New tokens from which numpy is quicker than Python."""
_MASK_64 = 2**64 - 1
_FACTORS = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0xD6E8FEB86659FD93,
    0xA0761D6478BD642F,
    0xE7037ED1A0B428DB,
)
"""Odd factors of a hash, the first for a run's last token."""


class SuffixIndex:
    """Index of one sequence, whose tokens only grow."""

    def __init__(self, expected_tokens: int) -> None:
        """Tables have room for `expected_tokens`, up to a limit. With more tokens, old runs are overwritten."""
        bits = min(max((2 * expected_tokens).bit_length(), MIN_TABLE_BITS), MAX_TABLE_BITS)
        self._shift = 64 - bits
        self._tables = tuple(array("i", bytes(4 << bits)) for _ in ORDERS)
        self._end = 1
        """Runs that end before this position are in the tables."""

    def draft(self, tokens: "array[int]", most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens that followed the last tokens where these occurred before, and the match's length.

        Where what followed reaches the end, it is repeated. Nothing and 0 where no run of the shortest order is known.
        """
        self._extend(tokens)
        end = len(tokens)
        for table, order in zip(self._tables, ORDERS, strict=True):
            if end <= order:
                continue
            found = table[self._hash(tokens, end, order)]
            if found and tokens[found - order : found] == tokens[end - order :]:
                draft = tokens[found : found + most].tolist()
                period = end - found
                while len(draft) < most:
                    draft.append(draft[len(draft) - period])
                return draft, _match_length(tokens, found, order)
        return [], 0

    def _hash(self, tokens: "array[int]", end: int, order: int) -> int:
        total = 0
        for factor in _FACTORS[:order]:
            end -= 1
            total += tokens[end] * factor
        return (total & _MASK_64) >> self._shift

    def _extend(self, tokens: "array[int]") -> None:
        """Add the runs that end before the last token. The run that ends with it is what is looked up."""
        first, end = self._end, len(tokens)
        for table, order in zip(self._tables, ORDERS, strict=True):
            start = max(first, order)
            if end - start >= _VECTOR_FROM:
                # The last of equal indices stays.
                np.frombuffer(table, np.int32)[self._hashes(tokens, start, order)] = np.arange(start, end)
                continue
            for position in range(start, end):
                table[self._hash(tokens, position, order)] = position
        self._end = max(first, end)

    def _hashes(self, tokens: "array[int]", start: int, order: int) -> npt.NDArray[np.int64]:
        """Return the hashes of the runs that end at positions from `start` on, before the last token."""
        known = np.frombuffer(tokens, np.int32).astype(np.uint64)
        total = np.zeros(len(tokens) - start, np.uint64)
        for back, factor in enumerate(_FACTORS[:order], start=1):
            total += known[start - back : len(tokens) - back] * np.uint64(factor)
        return (total >> np.uint64(self._shift)).astype(np.int64)


def _match_length(tokens: "array[int]", found: int, length: int) -> int:
    """Return how many tokens before position `found` equal the last ones. `length` of them are known to."""
    end = len(tokens)
    longest = min(found, LONGEST_MATCH)
    while length < longest and tokens[found - length - 1] == tokens[end - length - 1]:
        length += 1
    return length
