"""Host blocks: the KV of swapped or evicted blocks in host memory, and the copies there and back.

Owns the bytes of every host slot. Does not know which sequences they belong to or which slots are free: the scheduler's
plan says what moves where.

A slot holds one block of all layers in one piece. On the device one launch for all layers gathers blocks into a staging
buffer, or scatters them from it. From there slots that follow one another cross the bus in one copy.

Everything is queued on the device's current stream and nothing waits for it, so the order of calls is the order of
effects. A block may be written again as soon as `save` has returned: whatever writes it is queued behind the copy that
reads it. For the same reason the staging buffer serves one piece of a batch after the other. A slot just saved can be
loaded, and one just loaded can be overwritten. The buffer lives as long as this object, so no copy under way reads
memory that has gone back to the allocator. Work on another stream has to wait for this one.

Shapes: S host slots of a chunk, G blocks in the staging buffer, L layers, B blocks in the pool, N = L B of all layers.
K kv heads, P tokens a block, D head size.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from blockyard.worker.memory.checksums import crc32
from blockyard.worker.memory.transfers import upload
from blockyard.worker.sequences.identifiers import BlockId, HostSlot

# A pinned allocation is rounded up to a power of two. This many bytes at a time, filled with whole slots, waste little.
CHUNK_BYTES = 256 << 20
# Size of the staging buffer on the device. Enough that copies are large, little beside a pool.
STAGING_BYTES = 64 << 20
MEASURED_BLOCKS = 8
MEASURED_ROUNDS = 4

Pair = TypeVar("Pair")


class HostBlockCorrupted(RuntimeError):
    """Blocks in host memory are not what was saved there."""

    def __init__(self, slots: Iterable[HostSlot]) -> None:
        self.slots = frozenset(slots)
        super().__init__(f"host slots {sorted(self.slots)} do not hold what was saved there")


class HostBlocks:
    """Host slots for the blocks of one pool: `blocks_N2KPD` has those of all layers, layer after layer.

    With `verify`, a checksum of each slot is kept and checked before its block is used; every save and load then waits
    for the device. Not thread-safe. Raises ValueError for fewer than one slot.
    """

    def __init__(
        self, blocks_N2KPD: torch.Tensor, num_layers: int, num_slots: int, *, verify: bool = False
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}")
        self.num_slots = num_slots
        self._blocks_N2KPD = blocks_N2KPD
        self._num_blocks = len(blocks_N2KPD) // num_layers
        self._device = blocks_N2KPD.device
        self._block_shape_L2KPD = (num_layers, *blocks_N2KPD.shape[1:])
        self.slot_bytes = num_layers * blocks_N2KPD[0].nbytes
        self._slots_a_chunk = max(1, CHUNK_BYTES // self.slot_bytes)
        self._chunks_SL2KPD = self._allocate_chunks()
        num_staged = min(num_slots, max(1, STAGING_BYTES // self.slot_bytes))
        self._staging_GL2KPD = blocks_N2KPD.new_empty(num_staged, *self._block_shape_L2KPD)
        self._checksums: dict[HostSlot, int] | None = {} if verify else None

    def save(self, pairs: Sequence[tuple[BlockId, HostSlot]]) -> None:
        """Copy blocks to host slots, which are distinct."""
        for piece in self._pieces(sorted(pairs, key=lambda pair: pair[1])):
            rows = self._pool_rows([block for block, _ in piece])
            staged = self._staging_GL2KPD[: len(piece)].flatten(0, 1)
            torch.index_select(self._blocks_N2KPD, 0, rows, out=staged)
            for first, slots_S in self._runs([slot for _, slot in piece]):
                slots_S.copy_(self._staging_GL2KPD[first : first + len(slots_S)], non_blocking=True)
        if self._checksums is not None:
            self._synchronise()
            self._checksums |= {slot: self._checksum(slot) for _, slot in pairs}

    def load(self, pairs: Sequence[tuple[HostSlot, BlockId]]) -> None:
        """Copy host slots to blocks. Blocks are distinct, and every slot has been saved.

        Raises HostBlockCorrupted, having moved nothing, if the content of any slot is not what was saved.
        """
        if corrupted := self.corrupted(slot for slot, _ in pairs):
            raise HostBlockCorrupted(corrupted)
        for piece in self._pieces(sorted(pairs)):
            for first, slots_S in self._runs([slot for slot, _ in piece]):
                self._staging_GL2KPD[first : first + len(slots_S)].copy_(slots_S, non_blocking=True)
            rows = self._pool_rows([block for _, block in piece])
            self._blocks_N2KPD.index_copy_(0, rows, self._staging_GL2KPD[: len(piece)].flatten(0, 1))

    @property
    def verifies(self) -> bool:
        return self._checksums is not None

    def corrupted(self, slots: Iterable[HostSlot]) -> list[HostSlot]:
        """Return the slots that do not hold what was saved there. None without `verify`."""
        if self._checksums is None:
            return []
        self._synchronise()
        return [slot for slot in slots if self._checksum(slot) != self._checksums[slot]]

    def bytes_of(self, slot: HostSlot) -> memoryview:
        """Return a slot's bytes, to be read or written. Unlike `save` and `load`, that waits for no device."""
        return self._place(slot).view(torch.uint8).numpy().data.cast("B")

    def checksum_of(self, slot: HostSlot) -> int | None:
        """Return the CRC-32 of what was saved in a slot, or None without `verify`."""
        return None if self._checksums is None else self._checksums[slot]

    def received(self, slot: HostSlot, checksum: int) -> None:
        """Record that something wrote a slot's bytes, and their CRC-32."""
        if self._checksums is not None:
            self._checksums[slot] = checksum

    def regions(self) -> list[tuple[int, int]]:
        """Return address and length of the memory of all slots."""
        return [(chunk.data_ptr(), chunk.nbytes) for chunk in self._chunks_SL2KPD]

    def measure(self) -> float:
        """Measure the round trip, save and load, of the first blocks, and return its speed in blocks a second.

        Blocks keep their content. Slots are overwritten, so nothing may be in them yet.
        """
        count = min(MEASURED_BLOCKS, self.num_slots, self._num_blocks)
        # The first round touches the memory for the first time, and other work may delay any round.
        return count / min(self._round_trip_seconds(count) for _ in range(MEASURED_ROUNDS))

    def _round_trip_seconds(self, count: int) -> float:
        self._synchronise()
        begin = time.perf_counter()
        self.save([(BlockId(index), HostSlot(index)) for index in range(count)])
        self.load([(HostSlot(index), BlockId(index)) for index in range(count)])
        self._synchronise()
        return time.perf_counter() - begin

    def _pieces(self, pairs: Sequence[Pair]) -> list[Sequence[Pair]]:
        size = len(self._staging_GL2KPD)
        return [pairs[begin : begin + size] for begin in range(0, len(pairs), size)]

    def _pool_rows(self, blocks: Sequence[BlockId]) -> torch.Tensor:
        """Return the indices in N of each block's layers, block by block."""
        layers_L = np.arange(self._block_shape_L2KPD[0]) * self._num_blocks
        return upload((np.array(blocks, dtype=np.int64)[:, None] + layers_L).reshape(-1), self._device)

    def _runs(self, slots: Sequence[HostSlot]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield runs of rising slots that follow one another in memory: each run's first index and its slots."""
        first = 0
        for end in range(1, len(slots) + 1):
            is_last = end == len(slots)
            if is_last or slots[end] != slots[end - 1] + 1 or slots[end] % self._slots_a_chunk == 0:
                chunk, index = divmod(slots[first], self._slots_a_chunk)
                yield first, self._chunks_SL2KPD[chunk][index : index + end - first]
                first = end

    def _place(self, slot: HostSlot) -> torch.Tensor:
        assert 0 <= slot < self.num_slots, slot
        chunk, index = divmod(slot, self._slots_a_chunk)
        return self._chunks_SL2KPD[chunk][index]

    def _allocate_chunks(self) -> list[torch.Tensor]:
        counts = [
            min(self._slots_a_chunk, self.num_slots - first)
            for first in range(0, self.num_slots, self._slots_a_chunk)
        ]
        dtype, pinned = self._blocks_N2KPD.dtype, self._device.type == "cuda"
        return [
            torch.empty((count, *self._block_shape_L2KPD), dtype=dtype, pin_memory=pinned) for count in counts
        ]

    def _checksum(self, slot: HostSlot) -> int:
        return crc32(self.bytes_of(slot))

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
