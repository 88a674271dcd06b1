"""GPU memory: how much is left for KV, measured by running the largest possible step, not estimated.

The arithmetic is pure and knows no GPU. `Meter` is its interface to one, and `CudaMeter` asks torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

GIB = 2**30


class Meter(Protocol):
    """Readings of a device's memory, in bytes."""

    def taken(self) -> tuple[int, int]:
        """Return what all processes use of the device, and the device's size."""
        ...

    def reserved(self) -> int:
        """Return what the allocator holds, used or not. It is a part of `taken`."""
        ...

    def allocated(self) -> int:
        """Return what tensors use now. It is a part of `reserved`."""
        ...

    def forget_peak(self) -> None:
        """Restart the count of `peak`."""
        ...

    def peak(self) -> int:
        """Return the most that tensors used at once since `forget_peak`."""
        ...


class CudaMeter:
    """Implements `Meter` for one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def taken(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free, total

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def forget_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of one device in bytes, with the weights loaded and before there is a pool."""

    total: int
    foreign: int
    """Used by other processes, by CUDA itself and by libraries beside torch's allocator."""
    resident: int
    """Weights, and whatever else stays from step to step."""
    step: int
    """Used by the largest step on top of `resident`."""

    def for_pool(self, utilization: float, *, later: int) -> int:
        """Return what `utilization` of the device leaves for the pool. `later` bytes are used after the pool is made.

        Raises ValueError where nothing is left.
        """
        left = int(utilization * self.total) - self.foreign - self.resident - self.step - later
        if left <= 0:
            raise ValueError(
                f"no memory is left for the KV cache: of {self.total / GIB:.2f} GiB, --gpu-memory-utilization "
                f"{utilization:g} gives {utilization * self.total / GIB:.2f}, and {self.describe(later)} take "
                f"{-left / GIB:.2f} more. Raise it, or lower --max-num-batched-tokens or --max-num-seqs"
            )
        return left

    def describe(self, later: int) -> str:
        """Return where the memory goes, for a log."""
        return (
            f"weights {self.resident / GIB:.2f}, the largest step {self.step / GIB:.2f}, graphs and staging "
            f"{later / GIB:.2f}, CUDA and others {self.foreign / GIB:.2f} GiB"
        )


def measure(meter: Meter, largest_step: Callable[[], object]) -> MemoryUse:
    """Run the largest step twice, and return the memory that it takes. What the first run leaves is resident."""
    largest_step()
    meter.forget_peak()
    resident = meter.allocated()
    largest_step()
    peak = meter.peak()
    taken, total = meter.taken()
    return MemoryUse(
        total=total, foreign=taken - meter.reserved(), resident=resident, step=max(0, peak - resident)
    )
