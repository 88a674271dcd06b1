"""Torch collective: ranks that exchange tensors by torch.distributed, with NCCL on GPUs of one machine.

Unlike shared memory, NCCL cannot end an operation that waits for another rank. So a step that fails on one rank fails
the worker. Nothing waits for NCCL then: links notice the loss of a rank, and the processes end. Ranks meet by a file
that this user alone may open, because torch's own server listens on every interface (CVE-2025-47277).

Tested with gloo on a CPU. No GPU has run it so far.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from blockyard.worker.parallel.collective import RanksLost


class TorchCollective:
    """Implements `Collective`. A process has one at a time."""

    def __init__(
        self,
        kind: Literal["nccl", "gloo"],
        *,
        rank: int,
        size: int,
        meeting_file: Path,
        on_failure: Callable[[str], object] = lambda reason: None,
    ) -> None:
        """Meet the other ranks, which do the same at that time. `on_failure` is told why a step of this rank fails.

        Raises ValueError where PyTorch lacks the backend.
        """
        available = dist.is_nccl_available() if kind == "nccl" else dist.is_gloo_available()
        if not available:
            raise ValueError(f"this build of PyTorch has no {kind}, which ranks need")
        self.rank, self.size = rank, size
        self._on_failure = on_failure
        store = dist.FileStore(str(meeting_file), size)  # type: ignore[attr-defined]
        # With a device NCCL connects now, not within the first step.
        device = torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else None
        dist.init_process_group(kind, store=store, rank=rank, world_size=size, device_id=device)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = f"step {number} has failed on rank {self.rank}: {error}"
            self._on_failure(reason)
            raise RanksLost(reason) from error

    def all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x)

    def gather(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        parts = [torch.empty_like(x_SV) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x_SV.contiguous(), parts)
        return None if parts is None else torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor) -> None:
        dist.broadcast(x, 0)
