"""Collective: the operations of one step that all ranks of a worker do together.

Every rank calls the same operations in the same order. A rank that raises within a step makes the operations of that
step raise RankFailed on all others. All of them can take part in the next step.

Shapes: S rows, V vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class RankFailed(RuntimeError):
    """Another rank has failed in this step, or has not come within the deadline."""


class RanksLost(RankFailed):
    """Another rank has ended. No step succeeds any more."""


class Collective(Protocol):
    """The place of one rank among the others, and what they do together."""

    @property
    def rank(self) -> int:
        """Return the rank's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def step(self, number: int) -> AbstractContextManager[object]:
        """Take part in the step of this number, which is higher than that of every earlier one.

        An exception in the body reaches the other ranks as RankFailed.
        """
        ...

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace `x` by the sum of all ranks, the same on each, bit for bit."""
        ...

    def gather(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        """Return the parts of all ranks side by side in the last dimension on rank 0, None on the others.

        All parts have the same shape.
        """
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace `x` by that of rank 0."""
        ...


class Alone:
    """Implements `Collective` for one rank. Its operations do nothing."""

    rank = 0
    size = 1

    def step(self, number: int) -> AbstractContextManager[object]:
        return nullcontext()

    def all_reduce(self, x: torch.Tensor) -> None:
        pass

    def gather(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        return x_SV

    def broadcast(self, x: torch.Tensor) -> None:
        pass
