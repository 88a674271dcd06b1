"""Blocks in host memory: where the KV of swapped or evicted blocks lies, and the copies there and back.

Owns the bytes of every host slot. Does not know whose blocks they are or which slots are free: the scheduler says
in its plan what moves where.

A slot holds one block of all layers in one piece, so that a block crosses the bus in one large copy. On the device
the layers are gathered into, and scattered from, a staging buffer.

Everything is queued on the device's current stream and nothing waits for it, so the order of calls is the order of
effects. A block may be written again as soon as `save` has returned: whatever writes it is queued behind the copy
that reads it. For the same reason the staging buffer serves one piece of a batch after the other, a slot just saved
can be loaded, and one just loaded can be saved over. The buffer lives as long as this object: no copy under way
reads memory that has gone back to the allocator. Work on another stream has to wait for this one.

Shapes: S host slots of a chunk, G blocks in the staging buffer, L layers, B blocks in the pool, K kv heads, P tokens
a block, D head size.
"""

import time
import zlib
from collections.abc import Sequence
from typing import TypeVar

import torch
from blockyard.worker.sequence import BlockId, HostSlot

# A pinned allocation is rounded up to a power of two. This many bytes at a time, filled with whole slots, waste little.
CHUNK_BYTES = 256 << 20
# Blocks on their way, on the device. Enough that copies are large, little beside a pool.
STAGING_BYTES = 64 << 20
MEASURED_BLOCKS = 8
MEASURED_ROUNDS = 4

Pair = TypeVar("Pair")


class HostBlockCorrupted(RuntimeError):
    """A block in host memory is not what was saved there."""


class HostBlocks:
    """Host slots for the blocks of one pool: `kv_pools` has one [B, 2, K, P, D] for each layer.

    With `verify`, a checksum is kept of each slot and checked before its block is used; every save and load then
    waits for the device. Not thread-safe. Raises ValueError for fewer than one slot.
    """

    def __init__(self, kv_pools: Sequence[torch.Tensor], num_slots: int, *, verify: bool = False) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}")
        self.num_slots = num_slots
        self._kv_pools = kv_pools
        self._device = kv_pools[0].device
        self._block_shape_L2KPD = (len(kv_pools), *kv_pools[0].shape[1:])
        self.slot_bytes = len(kv_pools) * kv_pools[0][0].nbytes
        self._slots_a_chunk = max(1, CHUNK_BYTES // self.slot_bytes)
        self._chunks_SL2KPD = self._allocate_chunks()
        num_staged = min(num_slots, max(1, STAGING_BYTES // self.slot_bytes))
        self._staging_GL2KPD = kv_pools[0].new_empty(num_staged, *self._block_shape_L2KPD)
        self._checksums: dict[HostSlot, int] | None = {} if verify else None

    def save(self, pairs: Sequence[tuple[BlockId, HostSlot]]) -> None:
        """Copy blocks to host slots. Slots are distinct."""
        for piece in self._pieces(pairs):
            blocks_G = self._indices([block for block, _ in piece])
            for layer, kv_pool_B2KPD in enumerate(self._kv_pools):
                self._staging_GL2KPD[: len(piece), layer] = kv_pool_B2KPD.index_select(0, blocks_G)
            for staged_L2KPD, (_, slot) in zip(self._staging_GL2KPD, piece, strict=False):
                self._place(slot).copy_(staged_L2KPD, non_blocking=True)
        if self._checksums is not None:
            self._synchronise()
            self._checksums |= {slot: self._checksum(slot) for _, slot in pairs}

    def load(self, pairs: Sequence[tuple[HostSlot, BlockId]]) -> None:
        """Copy host slots to blocks. Blocks are distinct, every slot has been saved.

        Raises HostBlockCorrupted, having moved nothing, if a slot's content is not what was saved.
        """
        if self._checksums is not None:
            self._synchronise()
            for slot, _ in pairs:
                if self._checksum(slot) != self._checksums[slot]:
                    raise HostBlockCorrupted(f"host slot {slot} does not hold what was saved there")
        for piece in self._pieces(pairs):
            for staged_L2KPD, (slot, _) in zip(self._staging_GL2KPD, piece, strict=False):
                staged_L2KPD.copy_(self._place(slot), non_blocking=True)
            blocks_G = self._indices([block for _, block in piece])
            for layer, kv_pool_B2KPD in enumerate(self._kv_pools):
                kv_pool_B2KPD.index_copy_(0, blocks_G, self._staging_GL2KPD[: len(piece), layer])

    def measure(self) -> float:
        """Blocks a second of a round trip, save and load, on the first slots and blocks.

        Blocks are as they were afterwards; slots are overwritten, so nothing may be in them yet.
        """
        count = min(MEASURED_BLOCKS, self.num_slots, len(self._kv_pools[0]))
        # The first touches memory for the first time, and any may be held up by others.
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

    def _indices(self, blocks: Sequence[BlockId]) -> torch.Tensor:
        """Pinned where CUDA is, or the copy would wait for the stream."""
        on_host = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return on_host.to(self._device, non_blocking=True)

    def _place(self, slot: HostSlot) -> torch.Tensor:
        assert 0 <= slot < self.num_slots, slot
        chunk, index = divmod(slot, self._slots_a_chunk)
        return self._chunks_SL2KPD[chunk][index]

    def _allocate_chunks(self) -> list[torch.Tensor]:
        counts = [
            min(self._slots_a_chunk, self.num_slots - first)
            for first in range(0, self.num_slots, self._slots_a_chunk)
        ]
        dtype, pinned = self._kv_pools[0].dtype, self._device.type == "cuda"
        return [
            torch.empty((count, *self._block_shape_L2KPD), dtype=dtype, pin_memory=pinned) for count in counts
        ]

    def _checksum(self, slot: HostSlot) -> int:
        return zlib.crc32(self._place(slot).view(torch.uint8).numpy().data)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
