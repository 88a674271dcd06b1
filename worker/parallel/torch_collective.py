"""Torch collective: ranks that exchange tensors by torch.distributed: by NCCL on GPUs, by gloo between machines.

Unlike shared memory, neither can end an operation that waits for another rank. So a step that fails on one rank fails
the worker. Nothing waits for torch then: links notice the loss of a rank, and the processes end.

No GPU has run NCCL here so far. What passes between machines is not encrypted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from blockyard.kernels.cpu.group import DEADLINE_SECONDS
from blockyard.worker.parallel.collective import RanksLost
from blockyard.worker.parallel.link_store import LinkStore

POLL = timedelta(seconds=0.1)


class TorchCollective:
    """Implements `Collective` for ranks on GPUs."""

    def __init__(
        self, group: Any, *, rank: int, size: int, on_failure: Callable[[str], object] = lambda reason: None
    ) -> None:
        """`on_failure` is told why a step of this rank fails."""
        self.rank, self.size = rank, size
        self._group = group
        self._on_failure = on_failure

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        try:
            yield
        except RanksLost:
            raise
        except Exception as error:
            reason = f"step {number} has failed on rank {self.rank}: {error}"
            self._on_failure(reason)
            raise RanksLost(reason) from error

    def all_reduce(self, x: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.asyncOp = False
        self._wait(self._group.allreduce([x], options))

    def gather(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        parts = [torch.empty_like(x_SV) for _ in range(self.size)] if self.rank == 0 else None
        options = dist.GatherOptions()
        options.rootRank, options.asyncOp = 0, False
        self._wait(self._group.gather([] if parts is None else [parts], [x_SV.contiguous()], options))
        return None if parts is None else torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        self._wait(self._group.broadcast([x], options))

    def _wait(self, work: dist.Work) -> None:
        """Let what this rank does next follow the operation."""
        work.wait()


class GlooCollective(TorchCollective):
    """Implements `Collective` for ranks on CPUs of several machines. Any thread may call `end`."""

    _has_ended = False

    def end(self) -> None:
        """Let all waits raise RanksLost, now and later. What gloo waits for then ends with its deadline."""
        self._has_ended = True

    def _wait(self, work: dist.Work) -> None:
        while not self._has_ended:
            try:
                work.wait(POLL)
                return
            except RuntimeError:
                # It has failed, or it was not done in time. It may have ended since.
                if work.is_completed():
                    work.wait()
                    return
        raise RanksLost("another rank has ended")


def nccl_group(store: LinkStore, rank: int, size: int) -> Any:
    """Meet the other ranks on GPUs, which do the same at that time. A process has one such group at a time.

    Raises ValueError where PyTorch lacks NCCL.
    """
    if not dist.is_nccl_available():
        raise ValueError("this build of PyTorch has no NCCL, which ranks on GPUs need")
    # With a device NCCL connects now, not within the first step.
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    group = dist.group.WORLD
    assert group is not None
    return group


def gloo_group(store: LinkStore, rank: int, size: int, host: str) -> Any:
    """Meet the other ranks on CPUs. This one listens at `host` alone. Raises ValueError where PyTorch lacks gloo."""
    if not dist.is_gloo_available():
        raise ValueError("this build of PyTorch has no gloo, which ranks on several machines need")
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=DEADLINE_SECONDS)
    return dist.ProcessGroupGloo(store, rank, size, options)
