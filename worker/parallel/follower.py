"""Follower: a rank other than 0. It computes its part of each step that rank 0 sends, and decides nothing."""

import logging
from typing import Protocol

import torch
from blockyard.worker.parallel.collective import Collective, RankFailed
from blockyard.worker.parallel.step_arrays import StepArrays

logger = logging.getLogger(__name__)


class Part(Protocol):
    """The part of a model that one rank has, with its KV pool (execution/part_runner.py)."""

    def compute(self, arrays: StepArrays) -> None:
        """Do everything that the arrays say. Called within the collective's step."""
        ...


class Leader(Protocol):
    """Rank 0, as another rank sees it while it loads. Each call raises LinkClosed or RankLost once rank 0 has ended."""

    def pool_sizes(self) -> tuple[int, int]:
        """Wait for the numbers of blocks and host slots that every rank allocates, and return them."""
        ...

    def has_loaded(self) -> None:
        """Tell it that this rank can take part in steps that measure its memory."""
        ...

    def next_step(self) -> StepArrays:
        """Wait for the next step, and return it."""
        ...

    def has_measured(self, budget_bytes: int) -> None:
        """Tell it how many bytes this rank has for its KV cache."""
        ...


class Follower:
    """One rank's part of a model, and its place among the ranks. Not thread-safe."""

    def __init__(self, part: Part, collective: Collective) -> None:
        self._part = part
        self._collective = collective

    @torch.inference_mode()
    def run(self, arrays: StepArrays) -> None:
        """Compute a part of a step. A step that fails on any rank is logged: rank 0 decides what is run next."""
        number = int(arrays.numbers[0])
        try:
            with self._collective.step(number):
                self._part.compute(arrays)
        except RankFailed as failure:
            logger.warning("rank %d leaves step %d: %s", self._collective.rank, number, failure)
        except Exception:
            logger.exception("rank %d fails in step %d", self._collective.rank, number)
