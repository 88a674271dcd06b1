"""One case of the kernels benchmark, and the device on which it runs. Owns no kernel and no timing."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from blockyard.kernels.interface import Backend

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one shape. `make` allocates, and returns the call to be timed.

    `num_bytes` and `flops` are the least that the call must move and compute (cases.py).
    """

    kernel: str
    model: str
    shape: str
    num_bytes: int
    flops: int
    resident_bytes: int
    """Memory that the case needs, in bytes."""
    make: Callable[[], Callable[[], object]]
    turns: str = ""
    """Group name: consecutive cases with the same name are measured in turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Backend, device and data type of the cases."""

    backend: Backend
    device: torch.device
    dtype: torch.dtype

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def case_of_tokens(
    model: str,
    tokens: int,
    kernel: str,
    num_bytes: int,
    flops: int,
    make: Callable[[], Callable[[], object]],
) -> Case:
    return Case(
        kernel=kernel,
        model=model,
        shape=f"{tokens} tokens",
        num_bytes=num_bytes,
        flops=flops,
        resident_bytes=2 * num_bytes,
        make=make,
    )
