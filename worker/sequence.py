"""What the engine knows of one request: its tokens, how far they are computed, and where they lie.

Pure data. The scheduler moves the counters, the block pool hands out the blocks, the runner reads both.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NewType

SequenceId = NewType("SequenceId", int)
BlockId = NewType("BlockId", int)
BlockName = NewType("BlockName", bytes)


MAX_TEMPERATURE = 1e4
"""Flatter than any use has for it, and far from where float32 overflows."""


class FinishReason(Enum):
    STOP = auto()
    LENGTH = auto()


class SequenceState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()
    CANCELLED = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop; every default already filled in.

    Stop strings are not here: they are text, and are checked where tokens become text.
    Raises ValueError for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    """Empty means ignore_eos."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature must be between 0 and {MAX_TEMPERATURE:g}, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 <= self.min_tokens <= self.max_tokens or self.max_tokens < 1:
            raise ValueError(f"need 0 <= min_tokens {self.min_tokens} <= max_tokens {self.max_tokens} >= 1")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError("seed must fit 64 bits")


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One running output.

    Counters are token positions from 0: `num_computed <= num_scheduled <= len(tokens) + steps in flight`.
    KV is valid for positions below `num_computed`; a step in flight computes up to `num_scheduled`.
    """

    sequence_id: SequenceId
    tokens: list[int]
    """The prompt, then what was generated (also before a replay)."""
    prompt_length: int
    """Tokens the client sent; what follows counts as output."""
    sampling: SamplingParams
    names: list[BlockName]
    """The root's name, then one for each full block known so far: names[i + 1] names block i."""
    arrival: int = 0
    """Order of submission: the first-come-first-served key."""

    state: SequenceState = SequenceState.WAITING
    block_table: list[BlockId] = field(default_factory=list)
    num_scheduled: int = 0
    num_computed: int = 0
    num_named: int = 0
    """Leading blocks of the table that the prefix cache knows by name."""
    num_in_flight: int = 0
    """Steps planned and not yet committed that compute this sequence."""
    cached_at_submit: int = 0
    """Tokens that were cached when the scheduler got it: an estimate of what it will reuse."""
    cached_tokens: int | None = None
    """Prompt tokens reused at the first admission; None before it."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    deadline: float | None = None
    """On the engine's clock, in seconds."""

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_samples_in_flight(self) -> int:
        """Tokens that steps in flight will add: positions scheduled reach past the tokens known by as many."""
        return max(0, self.num_scheduled + 1 - len(self.tokens)) if self.num_in_flight else 0

    @property
    def is_over(self) -> bool:
        return self.state in (SequenceState.FINISHED, SequenceState.CANCELLED, SequenceState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRow:
    """A run of positions of one sequence that a step computes."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether the last position's logits yield a new token (false inside a chunked prompt)."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes. Rows of one token come first (they are decodes to attention)."""

    step: int
    rows: tuple[ScheduledRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
