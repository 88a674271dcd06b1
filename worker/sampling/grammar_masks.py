"""Interface that masks a step's logits by grammars (worker/grammar/masks.py implements it)."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.step_plan import ScheduledRow


class GrammarMasks(Protocol):
    """Structured output's part in a step. Never raises for what a request or a model has done."""

    def start(self, rows: Sequence[ScheduledRow]) -> None:
        """Begin to fill masks, in a thread beside the forward pass. Called before it with the rows that sample."""
        ...

    def apply(self, logits_SV: torch.Tensor, rows: Sequence[ScheduledRow]) -> None:
        """Set every forbidden token to minus infinity, in place. Called after the forward pass with the same rows."""
        ...

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Drop sequences that have ended. Unknown ones are ignored."""
        ...
