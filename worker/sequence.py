"""What the engine knows of one request: its tokens, how far they are computed, and where they lie.

Pure data. The scheduler moves the counters, the block pool hands out the blocks, the runner reads both.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Literal, NamedTuple, NewType

if TYPE_CHECKING:
    from blockyard.worker.beams import BeamGroup
    from blockyard.worker.host_memory import SwappedBlocks

RequestId = NewType("RequestId", int)
"""What a client asked for, inside one engine: one sequence, its `n` outputs, or its beams."""
SequenceId = NewType("SequenceId", int)
BlockId = NewType("BlockId", int)
TenantId = NewType("TenantId", int)
"""Whose a request is, and what is cached of it."""
BlockName = NewType("BlockName", bytes)
HostSlot = NewType("HostSlot", int)
"""A block's place in host memory."""

NOBODY = TenantId(0)
"""No tenant in particular; shares as one."""
NO_TOKEN = -1
"""What a row that does not sample yields."""
FAILED_TOKEN = -2
"""What a row yields whose logits were not finite."""
NO_CHOICE = -3
"""What a row yields whose request leaves no token to choose."""
LOST_TOKEN = -4
"""What a row yields that was not computed, because a block that it reads was lost: to be computed again without it."""
MAX_TEMPERATURE = 1e4
"""Flatter than any use has for it, and far from where float32 overflows."""
MAX_PENALTY = 2.0
"""Of presence and frequency, either sign, as OpenAI has it."""
MAX_LOGIT_BIAS = 100.0
MAX_LOGPROBS = 20
EarlyStopping = Literal["heuristic", "first", "never"]
"""When a beam search with enough finished beams ends: once the running ones are unlikely to be better (transformers'
False), at once (True), or only when they cannot be (never)."""


class FinishReason(StrEnum):
    STOP = auto()
    LENGTH = auto()


class SequenceState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()
    CANCELLED = auto()
    FAILED = auto()


def token_array(token_ids: Iterable[int] = ()) -> "array[int]":
    """Of int32, so four bytes a token, which the garbage collector need not walk as it walks a list. Raises
    OverflowError for one that does not fit."""
    return array("i", token_ids)


_OVER = (SequenceState.FINISHED, SequenceState.CANCELLED, SequenceState.FAILED)


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
    min_p: float = 0.0
    """Keep tokens at least this likely, as a share of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the output has already."""
    frequency_penalty: float = 0.0
    """The same for each time that the output has it."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that prompt or output have already."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    allowed_token_ids: frozenset[int] = frozenset()
    """Only these may be sampled. Empty: all."""
    bad_token_ids: frozenset[int] = frozenset()
    """These are never sampled."""
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    """Empty means ignore_eos."""
    n: int = 1
    """Outputs: sampled independently, or the best of the beams."""
    beam_width: int = 0
    """0 samples; otherwise a beam search, which is greedy: it ignores temperature and seed, and takes no filters."""
    length_penalty: float = 1.0
    """Beams are ranked by logprob / tokens ** length_penalty."""
    early_stopping: EarlyStopping = "heuristic"
    logprobs: int | None = None
    """How many of the likeliest tokens to name beside each sampled one; 0 only its own. None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, which is then computed whole."""

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            _check_range(name, getattr(self, name) or 0, 0, MAX_LOGPROBS)
        for _, bias in self.logit_bias:
            _check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise ValueError(f"repetition_penalty must be from 0.01 to 100, not {self.repetition_penalty}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be from 0 to max_tokens {self.max_tokens}, not {self.min_tokens}"
            )
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")
        if self.beam_width < 0 or (self.beam_width and self.n > self.beam_width):
            raise ValueError(f"beam_width must be 0 or at least n {self.n}, not {self.beam_width}")
        if not -10.0 <= self.length_penalty <= 10.0:
            raise ValueError(f"length_penalty must be from -10 to 10, not {self.length_penalty}")
        filters = self.top_k or self.top_p < 1.0 or self.min_p
        chooses = self.logit_bias or self.allowed_token_ids or self.bad_token_ids or self.penalises
        reports = self.logprobs is not None or self.prompt_logprobs is not None
        if self.beam_width and (filters or chooses or reports):
            raise ValueError("a beam search takes no filters, penalties, biases, token lists or logprobs")

    @property
    def penalises(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _check_range(name: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be between {lowest:g} and {highest:g}, not {value}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model held a token, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int
    """1 is the likeliest token of all."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their logprobs, in order, as many as were asked for."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One running output, or one beam.

    Counters are token positions from 0: `num_computed <= num_scheduled <= len(tokens) + steps in flight`.
    KV is valid for positions below `num_computed`; a step in flight computes up to `num_scheduled`.
    """

    sequence_id: SequenceId
    tokens: "array[int]"
    """The prompt, then what was generated (also before a replay), as `token_array` makes it."""
    prompt_length: int
    """Tokens the client sent; what follows counts as output."""
    sampling: SamplingParams
    names: list[BlockName]
    """The root's name, then one for each full block known so far: names[i + 1] names block i."""
    arrival: int = 0
    """Order of submission."""
    rank: float = 0.0
    """Who comes first: lower is earlier, `arrival` decides between equals. Time of arrival in seconds, later by
    `ageing_seconds` for each step of priority: so a waiting request passes younger ones of a better priority."""
    priority: int = 0
    """Lower is served earlier, and preempted later."""
    tenant: TenantId = NOBODY
    client: int = 0
    """The client whose turn its slow masks take."""
    request_id: RequestId = RequestId(0)
    index: int = 0
    """Which of the request's outputs."""
    num_outputs: int = 1
    """Outputs that this sequence will fork into at its first token; 1 once it has."""
    group: "BeamGroup | None" = None
    """The beam search it is part of."""
    grammar: object | None = None
    """What structured output must follow, as the runner knows it."""

    state: SequenceState = SequenceState.WAITING
    block_table: list[BlockId] = field(default_factory=list)
    num_scheduled: int = 0
    num_computed: int = 0
    plain_until: int = 0
    """Positions from `num_scheduled` up to here take no block, no copy, no name: they lie in the last block, which is
    the sequence's own, before its last position."""
    num_named: int = 0
    """Leading blocks of the table that the prefix cache knows by name."""
    num_in_flight: int = 0
    """Steps planned and not yet committed that compute this sequence."""
    cached_at_submit: int = 0
    """Tokens that were cached when the scheduler got it: an estimate of what it will reuse."""
    cached_tokens: int | None = None
    """Prompt tokens reused at the first admission; None before it."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are computed."""
    num_preemptions: int = 0
    swapped: "SwappedBlocks | None" = None
    """Blocks that a preemption has moved to host memory."""
    is_reserved: bool = False
    """It holds every block that it can ever need, and is preempted no more."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    deadline: float | None = None
    """On the engine's clock, in seconds."""

    @property
    def order(self) -> tuple[float, int]:
        return self.rank, self.arrival

    @property
    def wants_whole_prompt(self) -> bool:
        """Whether the prompt must be computed where it is cached, for its logits."""
        return self.sampling.prompt_logprobs is not None and not self.num_generated

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_samples_in_flight(self) -> int:
        """Tokens that steps in flight will add: positions scheduled reach past the tokens known by as many."""
        return max(0, self.num_scheduled + 1 - len(self.tokens)) if self.num_in_flight else 0

    @property
    def is_over(self) -> bool:
        return self.state in _OVER


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
