"""Ranks of a worker, as rank 0 sees them while it loads and leads steps. Does not connect them (worker/ranks.py)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from blockyard.worker.parallel.collective import Alone, Collective
from blockyard.worker.parallel.step_arrays import StepArrays


class Ranks(Protocol):
    """The ranks of a worker, as rank 0 sees them. Each call raises RanksLost where another rank has failed."""

    @property
    def collective(self) -> Collective: ...

    def lead(self, arrays: StepArrays) -> None:
        """Send a step to all other ranks, once they have loaded their parts."""
        ...

    def budgets(self) -> list[int]:
        """Return the bytes that each other rank has for its KV cache, once it has measured them."""
        ...

    def allocating(self, num_blocks: int, num_host_slots: int) -> AbstractContextManager[object]:
        """Let all other ranks allocate pools of these sizes meanwhile. At the end they are ready for steps."""
        ...


class _Alone:
    """Implements `Ranks` for a worker of one rank."""

    collective = Alone()

    def lead(self, arrays: StepArrays) -> None:
        pass

    def budgets(self) -> list[int]:
        return []

    def allocating(self, num_blocks: int, num_host_slots: int) -> AbstractContextManager[object]:
        return nullcontext()


ALONE: Ranks = _Alone()
