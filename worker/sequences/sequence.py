"""Sequence: one output of a request, with its tokens, how far they are computed, and its block table.

Pure data. The scheduler moves the counters, the block pool gives the blocks, the runner reads both.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING

from blockyard.worker.sequences.adapter import Adapter
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
    """Return the tokens as int32: four bytes a token, which the garbage collector need not walk as it walks a list.

    Raises OverflowError for a token that does not fit.
    """
    return array("i", token_ids)


_OVER = (SequenceState.FINISHED, SequenceState.CANCELLED, SequenceState.FAILED)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, before masks, penalties, temperature and filters."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most probable token of all."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens and their logprobs, in order, as many as the request asked for."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One output of a request, or one beam. Before its first token it stands for all outputs of the request.

    Counters are token positions from 0: `num_computed <= num_scheduled <= len(tokens) + steps in flight`. KV is valid
    for positions below `num_computed`. A step in flight computes up to `num_scheduled`.
    """

    sequence_id: SequenceId
    tokens: "array[int]"
    """The prompt, then the generated tokens (also those from before a replay), as `token_array` makes it."""
    prompt_length: int
    """Number of prompt tokens. The tokens behind them are output."""
    sampling: SamplingParams
    names: list[BlockName]
    """The root's name, then one for each full block known so far: names[i + 1] names block i."""
    arrival: int = 0
    """Order of submission."""
    rank: float = 0.0
    """Sort key of the queues: lower comes first, and `arrival` decides between equals.

    It is the arrival in seconds, plus `ageing_seconds` for each step of priority. So a waiting request passes younger
    ones of a better priority.
    """
    priority: int = 0
    """Lower is served earlier, and preempted later."""
    tenant: TenantId = NOBODY
    client: int = 0
    """The client behind the request. Clients take turns at slow grammar masks."""
    request_id: RequestId = RequestId(0)
    index: int = 0
    """Index of this output within its request."""
    num_outputs: int = 1
    """Outputs into which this sequence will fork at its first token. 1 once it has forked."""
    group: "BeamGroup | None" = None
    """The beam search that it belongs to. None without one."""
    grammar: object | None = None
    """The grammar of structured output, in the runner's form."""
    adapter: Adapter | None = None
    """The adapter that computes it. None: the bare model."""

    state: SequenceState = SequenceState.WAITING
    block_table: BlockTable = field(default_factory=BlockTable)
    num_scheduled: int = 0
    """End of the positions that steps were planned for. vLLM's num_scheduled_tokens counts one step's alone."""
    num_computed: int = 0
    """End of the positions with valid KV. It moves when a step is committed, not when it is planned."""
    plain_until: int = 0
    """Positions from `num_scheduled` up to here need no new block, no copy and no name.

    They lie in the last block, which only this sequence holds, before its last position.
    """
    num_named: int = 0
    """Leading blocks of the table that have a name in the prefix cache."""
    num_in_flight: int = 0
    """Steps planned and not yet committed that compute this sequence."""
    cached_at_submit: int = 0
    """Tokens of the sequence that, at its submit, were cached or to be computed for another: what it should reuse."""
    cached_tokens: int | None = None
    """Prompt tokens that the first admission found in the cache. None before it."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Logprobs of the prompt's tokens from the second on, as far as they are computed."""
    is_pulling: bool = False
    """Whether it waits for blocks from another worker, and is not admitted yet."""
    num_preemptions: int = 0
    expected_pause_seconds: float = 0.0
    """Time from its end until its session is expected to come back. 0: unknown."""
    may_move: bool = False
    """Whether its request may be given back to the router, which continues it on another worker."""
    swapped: "SwappedBlocks | None" = None
    """Blocks that a preemption has moved to host memory."""
    is_reserved: bool = False
    """Room is set aside for every block that it can ever need, so it is never preempted again."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    deadline: float | None = None
    """Time on the engine's clock in seconds, after which the request ends. None: it never expires."""

    @property
    def order(self) -> tuple[float, int]:
        return self.rank, self.arrival

    @property
    def wants_whole_prompt(self) -> bool:
        """Whether the prompt must be computed even where it is cached, because the request wants its logprobs."""
        return self.sampling.prompt_logprobs is not None and not self.num_generated

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_samples_in_flight(self) -> int:
        """Tokens that steps in flight will add: scheduled positions reach past the known tokens by as many."""
        return max(0, self.num_scheduled + 1 - len(self.tokens)) if self.num_in_flight else 0

    @property
    def is_over(self) -> bool:
        return self.state in _OVER
