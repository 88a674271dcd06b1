"""Step moves: make each block move of a step once, although a step that raised is run again, whole or in parts.

Pure: it decides which moves are still to be made. The caller makes them (runner.py, memory/host_blocks.py).
"""

from collections.abc import Callable, Sequence

from blockyard.worker.sequences.identifiers import BlockId, HostSlot
from blockyard.worker.sequences.step_plan import StepPlan

KEPT_STEPS = 2
"""Steps to remember: one step in flight may be run again after the next one has begun."""


class StepMoves:
    """Makes the moves of one runner's steps: to the host, then from the host, then copies.

    Each of the three writes nothing that it reads, so one that has raised is made again from its beginning. One that
    has ended is not made again: a block that was saved may by then hold what was loaded from the host.
    """

    def __init__(
        self,
        *,
        save: Callable[[Sequence[tuple[BlockId, HostSlot]]], None],
        load: Callable[[Sequence[tuple[HostSlot, BlockId]]], None],
        copy: Callable[[Sequence[tuple[BlockId, BlockId]]], None],
    ) -> None:
        self._save = save
        self._load = load
        self._copy = copy
        self._num_made: dict[int, int] = {}
        """How many of the three have ended, for each of the last steps that moved anything."""

    def make(self, plan: StepPlan) -> None:
        """Make the moves that are still to be made. Raises what a move raises."""
        if not (plan.to_host or plan.from_host or plan.copies):
            return
        num_made = self._num_made.setdefault(plan.step, 0)
        while len(self._num_made) > KEPT_STEPS:
            del self._num_made[next(iter(self._num_made))]
        if num_made < 1 and plan.to_host:
            self._save(plan.to_host)
        self._num_made[plan.step] = max(num_made, 1)
        if num_made < 2 and plan.from_host:
            self._load(plan.from_host)
        self._num_made[plan.step] = max(num_made, 2)
        if num_made < 3 and plan.copies:
            self._copy(plan.copies)
        self._num_made[plan.step] = 3
