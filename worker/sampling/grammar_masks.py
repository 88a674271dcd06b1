"""The interface through which a step's logits are masked by grammars (worker/grammar/masks.py implements it)."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.step_plan import ScheduledRow


class GrammarMasks(Protocol):
    """What structured output adds to a step. Never raises for what a request or a model has done."""

    def start(self, rows: Sequence[ScheduledRow]) -> None:
        """Called before the forward pass with the rows that sample: may fill masks in a thread beside it."""
        ...

    def apply(self, logits_SV: torch.Tensor, rows: Sequence[ScheduledRow]) -> None:
        """Called after it with the same rows: in place, minus infinity for every token that may not come."""
        ...

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Sequences that have left, whether it knows them or not."""
        ...
