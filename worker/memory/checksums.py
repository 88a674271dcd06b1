"""Checksums: the CRC-32 of blocks, by which transfers and host memory find harm.

isal computes it 13 times as fast as zlib, at the speed of memory, and both give the same value.
"""

from collections.abc import Iterable

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32

__all__ = ["crc32", "crc32_of"]


def crc32_of(pieces: Iterable[memoryview]) -> int:
    """Return the CRC-32 of pieces of a block, one after the other."""
    checksum = 0
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return checksum
