"""Transfers of small arrays to the device and back, queued behind its computation. The host waits for none of them.

A copy from or to pageable memory waits until the stream before it is done, so a step could not be prepared while
another runs. From pinned memory it is queued; the allocator keeps such memory until the copy has ended. On a CPU
nothing is copied.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any] | Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the values on the device, in a numpy array's data type; integers of any other sequence as int64.

    On a CPU the tensor shares a contiguous array's memory.
    """
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=np.int64)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda" or not array.size:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Readback:
    """Copy of a device tensor to the host, queued until the device has computed it.

    The caller may drop its own tensor, but must not write into it: on a CPU nothing is copied.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._done: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> torch.Tensor:
        """Wait, and return it on the host. Raises what the device has raised since the copy was queued."""
        if self._done is not None:
            self._done.synchronize()
        return self._values
