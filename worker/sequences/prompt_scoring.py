"""Which positions of a row tell how likely its prompt was. Pure: no tensors."""

from blockyard.worker.sequences.step_plan import ScheduledRow

SCORED_AT_ONCE = 256
"""Positions whose logits are held at once: 2,048 over a vocabulary of 128k would be 1 GiB."""


def scored_positions(row: ScheduledRow) -> range:
    """Positions whose logits say how likely the prompt's next token was."""
    if not row.sequence.wants_whole_prompt:
        return range(0)
    return range(row.start, min(row.end, row.sequence.prompt_length - 1))
