"""What the engine knows of one request: its tokens, how far they are computed, and where they lie.

Pure data. The scheduler moves the counters, the block pool hands out the blocks, the runner reads both.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING

from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import NOBODY, BlockName, RequestId, SequenceId, TenantId
from blockyard.worker.sequences.sampling_params import SamplingParams

if TYPE_CHECKING:
    from blockyard.worker.sequences.beams import BeamGroup
    from blockyard.worker.sequences.identifiers import SwappedBlocks


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
    block_table: BlockTable = field(default_factory=BlockTable)
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
