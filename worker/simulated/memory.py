"""Simulated memory: blocks without content, so that transfers between simulated workers have bytes to send."""

from collections.abc import Callable

from blockyard.proto.naming.block_kind import BlockKind
from blockyard.worker.sequences.identifiers import BlockId, HostSlot

SIMULATED = BlockKind(layout="order=none/1", arithmetic="kernels=simulated")
"""Blocks without content, which any other may stand for."""


class SimulatedMemory:
    """Implements TransferableMemory. All blocks share the same few bytes, which are never read."""

    kind = SIMULATED
    block_bytes = 64
    is_in_place = False

    def __init__(self) -> None:
        self._bytes = bytearray(self.block_bytes)

    def regions(self) -> list[tuple[int, int]]:
        return []

    def fence(self) -> Callable[[], object]:
        return lambda: None

    def block(self, block: BlockId) -> list[memoryview]:
        return [memoryview(self._bytes)]

    def slot(self, slot: HostSlot) -> memoryview:
        return memoryview(self._bytes)

    def checksum(self, slot: HostSlot) -> int | None:
        return None

    def received(self, slot: HostSlot, checksum: int) -> None:
        pass
