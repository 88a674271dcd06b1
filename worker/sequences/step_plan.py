"""A step's plan and its result: which rows it computes, which blocks move, which tokens came out. Pure data."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass
from blockyard.worker.sequences.identifiers import BlockId, HostSlot, SequenceId
from blockyard.worker.sequences.sequence import Sequence, TokenLogprob

NO_TOKEN = -1
"""What a row that does not sample yields."""


FAILED_TOKEN = -2
"""What a row yields whose logits were not finite."""


NO_CHOICE = -3
"""What a row yields whose request leaves no token to choose."""


LOST_TOKEN = -4
"""What a row yields that was not computed, because a block that it reads was lost: to be computed again without it."""


class ScheduledRow(NamedTuple):
    """A run of positions of one sequence that a step computes. A tuple, because each step makes one a sequence."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether the last position's logits yield a new token (false inside a chunked prompt)."""
    is_plain: bool = False
    """Whether the sequence's blocks are known to be those that its last step had."""

    @property
    def num_outputs(self) -> int:
        """Tokens drawn from the last position's logits: one for each output where the sequence forks."""
        return self.sequence.num_outputs if self.samples else 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes. Rows of one token come first (they are decodes to attention).

    Blocks move before anything is computed, in this order: `to_host`, `from_host`, `copies`. So a block may be
    saved, and filled again, in one step.
    """

    step: int
    rows: tuple[ScheduledRow, ...]
    to_host: tuple[tuple[BlockId, HostSlot], ...] = ()
    from_host: tuple[tuple[HostSlot, BlockId], ...] = ()
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    """(source, destination): destinations are distinct, and none is a source."""
    ended: tuple[SequenceId, ...] = ()
    """Sequences that have left since the last plan: what is remembered of them may go."""

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self.to_host or self.from_host or self.copies)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExtras:
    """What a row brings beyond one token."""

    tokens: tuple[int, ...] = ()
    """Where the sequence forks: the tokens of its outputs from the second on."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token of the row (n of them where it forks), if the request wants them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens at positions start + 1 to end, as far as they are the prompt's."""
    candidates: tuple[tuple[int, float], ...] = ()
    """Of a beam: its likeliest tokens and their logprobs, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """What a step has sampled."""

    tokens: list[int]
    """One a row: NO_TOKEN where it sampled none, FAILED_TOKEN, NO_CHOICE or LOST_TOKEN where it could not."""
    extras: dict[int, RowExtras] = field(default_factory=dict)
    """By index of the row; most rows have none."""
    lost_slots: frozenset[HostSlot] = frozenset()
    """What lies in them is not what was saved there."""
