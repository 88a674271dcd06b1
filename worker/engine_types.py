"""What goes into an engine, and what comes out of it. Plain values."""

from dataclasses import dataclass

from blockyard.worker.cache.prefix_cache import CacheChanges
from blockyard.worker.sequences.identifiers import NOBODY, BlockName, RequestId, TenantId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import FinishReason, SequenceState, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """An output of a replayed request, and what it has so far."""

    index: int
    token_ids: tuple[int, ...]
    """At least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What to run. `token_ids` is the prompt, then, for a request with one output, tokens generated before a replay."""

    token_ids: list[int]
    prompt_length: int
    names: list[BlockName]
    """The root's name, then those of the prompt's full blocks (they may stop short: the rest is computed)."""
    sampling: SamplingParams
    deadline_seconds: float | None = None
    priority: int = 0
    """Lower is served earlier, and preempted later."""
    tenant: TenantId = NOBODY
    """On whose account it is cached."""
    client: int = 0
    """The client whose turn its slow masks take; 0 is nobody in particular."""
    continuations: tuple[Continuation, ...] = ()
    """A replay of a request with several outputs: those that are unfinished. `token_ids` is then the prompt alone."""
    grammar: object | None = None
    """What the output must follow, compiled; for the runner."""


@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """What one step brought one output of a request. One without tokens ends the whole request early: what its outputs
    have so far is all that comes of them. Nobody changes it; it is not frozen because each step makes one a sequence,
    and freezing is most of what that costs."""

    request_id: RequestId
    index: int = 0
    token_ids: tuple[int, ...]
    """One token, or all of a beam's at its end."""
    token_offset: int
    """Tokens generated before these."""
    cached_tokens: int
    state: SequenceState
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    expired: bool = False
    """The deadline passed, or cannot be met: nobody waits for the rest."""
    has_no_choice: bool = False
    """The request's own restrictions left no token to choose."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """With the first token of output 0."""
    cumulative_logprob: float | None = None
    """Of a beam."""
    beam_score: float | None = None
    is_last: bool = False
    """Nothing more comes of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    outputs: tuple[SequenceOutput, ...]
    changes: CacheChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What routers place by, and operators look at. Counters are since the engine's start."""

    running: int
    waiting: int
    queued_prefill_tokens: int
    context_tokens: int
    """Of all running sequences, as often as they are read: a shared prefix counts once for each sharer."""
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    swaps: int
    """Preemptions that moved blocks to host memory."""
    host_cached_blocks: int
    """Names that host memory holds."""
    host_tokens_per_second: float
    """Of blocks moved to host memory and back; 0 is unknown."""
