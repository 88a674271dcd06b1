"""Prompt scoring: which positions of a row give the log-probabilities of its prompt. Pure: no tensors."""

from collections.abc import Iterator

from blockyard.worker.sequences.step_plan import ScheduledRow

SCORED_AT_ONCE = 256
"""Positions whose logits are held in memory at once. 2,048 positions over a vocabulary of 128k would take 1 GiB."""


def scored_positions(row: ScheduledRow) -> range:
    """Return the row's positions whose logits score the prompt token after them.

    The range is empty if the request wants no prompt logprobs.
    """
    if not row.sequence.wants_whole_prompt:
        return range(0)
    return range(row.start, min(row.end, row.sequence.prompt_length - 1))


def pieces(num_scored: int) -> Iterator[slice]:
    """Yield slices of at most SCORED_AT_ONCE positions."""
    for first in range(0, num_scored, SCORED_AT_ONCE):
        yield slice(first, min(first + SCORED_AT_ONCE, num_scored))
