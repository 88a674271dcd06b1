"""Marks: shortened names of some of a prompt's blocks, by which a worker tells routers which prefixes have reached it.

A mark stands for the whole prefix up to its block. Marked blocks lie at equal distances, so a router finds the longest
common prefix to within one distance. Marks are hints: two prefixes with one mark cost cache hits, never a token.
"""

from collections.abc import Sequence

MARK_BYTES = 8
MARK_TOKENS = 128
"""Distance between marks of a short prompt, in tokens. A prompt shorter than this has no mark."""
MAX_MARKS = 32
"""Most marks of a prompt. Longer prompts have them at twice the distance, or four times, and so on."""
MAX_MARKS_BYTES = 2**16
"""Most bytes of marks in one message: those of 256 long prompts."""


def least_distance(block_size: int) -> int:
    """Return the least distance between marks, in blocks. Every other distance is a multiple of it."""
    return max(MARK_TOKENS // block_size, 1)


def distance_between(num_blocks: int, block_size: int) -> int:
    """Return the distance between marks of a prompt of `num_blocks`, in blocks."""
    distance = least_distance(block_size)
    while num_blocks // distance > MAX_MARKS:
        distance *= 2
    return distance


def marks(names: Sequence[bytes], block_size: int) -> bytes:
    """Return the marks of a prompt with these block names, shortest prefix first."""
    distance = distance_between(len(names), block_size)
    return b"".join(name[:MARK_BYTES] for name in names[distance - 1 :: distance])


def split_marks(packed: bytes) -> list[bytes]:
    """Return the marks in `packed`, at most those of one message, without an incomplete one at the end."""
    length = min(len(packed), MAX_MARKS_BYTES) // MARK_BYTES * MARK_BYTES
    return [packed[start : start + MARK_BYTES] for start in range(0, length, MARK_BYTES)]


def marked_depths(num_blocks: int, block_size: int) -> range:
    """Return the depths, in blocks, at which a prompt of `num_blocks` may share a mark with another, deepest first."""
    distance = least_distance(block_size)
    return range(num_blocks // distance * distance, 0, -distance)
