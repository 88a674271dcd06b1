"""Transferable memory: the bytes of blocks and host slots, for transfers between workers.

Threads of a transfer call it beside the engine. A block that is lent, and a slot that is reserved, is changed by nobody
else (cache/block_tables.py, cache/host_memory.py).

Shapes: B blocks in the pool, L layers, N = L B blocks of all layers, each of kv heads, tokens and a head size.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from blockyard.proto.naming.block_kind import BlockKind
from blockyard.worker.memory.host_blocks import HostBlocks
from blockyard.worker.sequences.identifiers import BlockId, HostSlot


class TransferableMemory(Protocol):
    """The memory of one runner's blocks, as transfers see it."""

    kind: BlockKind
    """The kind that another worker's blocks must have to take the place of these."""
    block_bytes: int
    """Bytes of a block, all layers. Those of a host slot too."""
    is_in_place: bool
    """Whether `block` returns the block's own memory, which stays valid as long as the block is lent."""

    def regions(self) -> list[tuple[int, int]]:
        """Return address and length of all memory in which blocks and slots are, where it is in place."""
        ...

    def fence(self) -> Callable[[], object]:
        """Return a function that waits until the device has done what is queued on it now.

        Call this on the engine's thread, and the function before any slot is read or written.
        """
        ...

    def block(self, block: BlockId) -> list[memoryview]:
        """Return the bytes of a block on the device, in pieces, in the order of a host slot. They are valid until the
        same thread calls this again."""
        ...

    def slot(self, slot: HostSlot) -> memoryview:
        """Return the bytes of a host slot, to be read or written."""
        ...

    def checksum(self, slot: HostSlot) -> int | None:
        """Return the CRC-32 of the bytes that were saved in a slot. None where none is kept."""
        ...

    def received(self, slot: HostSlot, checksum: int) -> None:
        """Record that a slot was written. `checksum` is the CRC-32 of its bytes."""
        ...


class TorchMemory:
    """Implements TransferableMemory for a pool and its host slots. On a GPU it has run in no test yet."""

    def __init__(
        self, blocks_N2KPD: torch.Tensor, num_layers: int, host_blocks: HostBlocks | None, kind: BlockKind
    ) -> None:
        """`blocks_N2KPD` has the blocks of all layers, layer after layer, in a type that can be moved
        (kernels/kv_pool.py)."""
        self.kind = kind
        self.block_bytes = num_layers * blocks_N2KPD[0].nbytes
        self._blocks_LBX = blocks_N2KPD.view(torch.uint8).view(
            num_layers, len(blocks_N2KPD) // num_layers, -1
        )
        self._device = blocks_N2KPD.device
        self.is_in_place = self._device.type != "cuda"
        self._host_blocks = host_blocks

    def regions(self) -> list[tuple[int, int]]:
        host = [] if self._host_blocks is None else self._host_blocks.regions()
        return [(self._blocks_LBX.data_ptr(), self._blocks_LBX.nbytes), *host]

    def fence(self) -> Callable[[], object]:
        if self._device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def block(self, block: BlockId) -> list[memoryview]:
        layers_LX = self._blocks_LBX[:, block]
        if self._device.type != "cuda":
            return [piece_X.numpy().data for piece_X in layers_LX]
        # The block is final, so its kernels have ended. A stream of its own waits for no step.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            copied_LX = torch.empty(layers_LX.shape, dtype=torch.uint8, pin_memory=True)
            copied_LX.copy_(layers_LX, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return [copied_LX.numpy().data.cast("B")]

    def slot(self, slot: HostSlot) -> memoryview:
        assert self._host_blocks is not None, "there are no host slots"
        return self._host_blocks.bytes_of(slot)

    def checksum(self, slot: HostSlot) -> int | None:
        assert self._host_blocks is not None, "there are no host slots"
        return self._host_blocks.checksum_of(slot)

    def received(self, slot: HostSlot, checksum: int) -> None:
        assert self._host_blocks is not None, "there are no host slots"
        self._host_blocks.received(slot, checksum)
