"""Step plan and its result: the rows to compute, the blocks to move, and the sampled tokens. Pure data."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from blockyard.worker.sequences.adapter import Adapter
from blockyard.worker.sequences.identifiers import BlockId, HostSlot, SequenceId
from blockyard.worker.sequences.sequence import Sequence, TokenLogprob

NO_TOKEN = -1
"""Stands for the token of a row that does not sample."""


FAILED_TOKEN = -2
"""Stands for the token of a row that failed: it raised alone, or its results were not finite."""


NO_CHOICE = -3
"""Stands for the token of a row whose request forbids every token, by its grammar or its token lists."""


LOST_TOKEN = -4
"""Stands for the token of a row that was not computed, because host memory lost a block that it reads.

The sequence waits again, and computes that block."""


class ScheduledRow(NamedTuple):
    """A run of positions of one sequence that a step computes. A tuple, because each step makes one for each
    sequence."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether the last position's logits give a new token (false inside a chunked prompt)."""
    is_plain: bool = False
    """Whether the sequence is known to have the same blocks as in its last step."""

    @property
    def num_outputs(self) -> int:
        """Tokens drawn from the last position's logits: one for each output where the sequence forks."""
        return self.sequence.num_outputs if self.samples else 0

    @property
    def embeds(self) -> bool:
        """Whether the last position's hidden state gives the prompt's embedding."""
        return self.sequence.sampling.embeds and self.end == self.sequence.prompt_length

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of one step. Rows of one token come first (attention treats them as decodes).

    Blocks move before anything is computed, in this order: `to_host`, `from_host`, `copies`. So one step may save a
    block and fill it again.
    """

    step: int
    rows: tuple[ScheduledRow, ...]
    to_host: tuple[tuple[BlockId, HostSlot], ...] = ()
    from_host: tuple[tuple[HostSlot, BlockId], ...] = ()
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    """Pairs (source, destination). Destinations are distinct, and none is a source."""
    ended: tuple[SequenceId, ...] = ()
    """Sequences that have ended since the last plan. The runner may drop their state."""
    adapters: tuple[tuple[int, Adapter], ...] = ()
    """The adapters that rows use, each with the slot that must hold it. The runner loads those that are not there."""

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self.to_host or self.from_host or self.copies)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExtras:
    """Results of a row beyond its first token."""

    tokens: tuple[int, ...] = ()
    """Where the sequence forks: the tokens of its outputs from the second on."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token of the row (n where it forks), if the request wants logprobs."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Logprobs of the prompt's tokens at positions start + 1 to end, as far as they are in the prompt."""
    embedding: bytes = b""
    """The prompt's embedding in its last chunk, if the request wants it: float32, little-endian."""
    candidates: tuple[tuple[int, float], ...] = ()
    """Most probable next tokens of a beam and their logprobs, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The tokens that a step has sampled."""

    tokens: list[int]
    """One for each row. NO_TOKEN where it sampled none; FAILED_TOKEN, NO_CHOICE or LOST_TOKEN where it could not."""
    extras: dict[int, RowExtras] = field(default_factory=dict)
    """Keyed by index of the row. Most rows have none."""
    lost_slots: frozenset[HostSlot] = frozenset()
    """Slots of host memory that do not hold what was saved there."""
    adapter_seconds: dict[str, float] = field(default_factory=dict)
    """Time of each adapter that the step has loaded, by fingerprint."""


def decodes_first(rows: Collection[ScheduledRow]) -> tuple[ScheduledRow, ...]:
    """Return the rows in their order, those of one token before the others."""
    decodes = tuple([row for row in rows if row.num_tokens == 1])
    return decodes if len(decodes) == len(rows) else (*decodes, *(row for row in rows if row.num_tokens > 1))
