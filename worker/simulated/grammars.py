"""Structured output of a simulated model: each drawn token moves on to the next token that its grammar allows.

So replays and grammars can be tested together without weights. Owns that choice alone. The same masks as for a real
model say which tokens are allowed (grammar/masks.py). Separate from runner.py, which needs no torch.

Shapes: S rows, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from blockyard.worker.sampling.grammar_masks import GrammarMasks
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.step_plan import NO_CHOICE, ScheduledRow


class SimulatedGrammars:
    def __init__(self, masks: GrammarMasks, vocab_size: int) -> None:
        self._masks = masks
        self._vocab_size = vocab_size

    def chosen(self, rows: Sequence[ScheduledRow], drawn: Sequence[list[int]]) -> list[list[int]]:
        """Return the tokens of each row, each drawn one replaced by one that the row's grammar allows."""
        logits_SV = torch.zeros(len(rows), self._vocab_size)
        self._masks.start(rows)
        self._masks.apply(logits_SV, rows)
        return [
            [_next_allowed(allowed_V, token) for token in tokens]
            for allowed_V, tokens in zip(torch.isfinite(logits_SV), drawn, strict=True)
        ]

    def forget(self, ended: Iterable[SequenceId]) -> None:
        self._masks.forget(ended)


def _next_allowed(allowed_V: torch.Tensor, token: int) -> int:
    """Return the first allowed token from `token` on, which wraps around. NO_CHOICE where none is allowed."""
    allowed = allowed_V.nonzero().flatten()
    if not len(allowed):
        return NO_CHOICE
    at = int(torch.searchsorted(allowed, token))
    return int(allowed[at % len(allowed)])
