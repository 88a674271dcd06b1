"""Engine types: requests to an engine, and its results. Plain values."""

import struct
from dataclasses import dataclass

from blockyard.worker.cache.prefix_cache import CacheChanges
from blockyard.worker.scheduling.pulls import PullOrder
from blockyard.worker.sequences.adapter import ResidentAdapter
from blockyard.worker.sequences.identifiers import NOBODY, BlockName, RequestId, TenantId
from blockyard.worker.sequences.phases import Phase
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import FinishReason, SequenceState, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """One output of a replayed request, and its tokens so far."""

    index: int
    token_ids: tuple[int, ...]
    """The tokens generated so far, at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request to run. `token_ids` is the prompt, then the tokens generated before a replay of a single output."""

    token_ids: list[int]
    prompt_length: int
    names: list[BlockName]
    """The root's name, then those of the prompt's full blocks. They may stop short: the rest is computed."""
    sampling: SamplingParams
    deadline_seconds: float | None = None
    priority: int = 0
    """Lower is served earlier, and preempted later."""
    tenant: TenantId = NOBODY
    """The tenant on whose account its cached blocks go, unless they extend another tenant's."""
    client: int = 0
    """The client whose turns the request's slow grammar masks take. 0 stands for no client in particular."""
    continuations: tuple[Continuation, ...] = ()
    """The unfinished outputs of a replayed request that has several. `token_ids` is then the prompt alone."""
    grammar: object | None = None
    """The compiled grammar that the output must follow, for the runner."""
    adapter: str = ""
    """Fingerprint of the adapter that computes it. Empty: the bare model."""
    pull: PullOrder | None = None
    """Blocks to fetch from another worker before the prompt is computed."""
    preemptions: int | None = None
    """How many workers have preempted it and given it back. None: it must not be given back."""
    expected_pause_seconds: float = 0.0
    """Time from its end until its session is expected to come back. 0: unknown."""


@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """One step's result for one output of a request.

    A result without tokens or embedding ends the whole request early: its outputs get no more than they have so far.
    Do not change a result. It is not frozen, because each step makes one for each sequence, and freezing is most of
    that cost.
    """

    request_id: RequestId
    index: int = 0
    token_ids: tuple[int, ...]
    """One token, or all of a beam's at its end. Empty where the request ends early."""
    token_offset: int
    """Number of the output's tokens generated before these."""
    cached_tokens: int
    state: SequenceState
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    expired: bool = False
    """Whether the request ended because its deadline has passed or cannot be met."""
    is_given_back: bool = False
    """Whether the request was preempted, to go on on another worker."""
    has_no_choice: bool = False
    """Whether the request ended because its own limits forbid every token."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Set with the first token of output 0."""
    cumulative_logprob: float | None = None
    """Set for a beam."""
    beam_score: float | None = None
    embedding: bytes = b""
    """The prompt's embedding, which ends the request: float32, little-endian."""
    is_last: bool = False
    """Whether the request gets no more results."""


def unpack_embedding(packed: bytes) -> tuple[float, ...]:
    """Return the numbers of a result's embedding."""
    return struct.unpack(f"<{len(packed) // 4}f", packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    outputs: tuple[SequenceOutput, ...]
    changes: CacheChanges
    phases: tuple[tuple[RequestId, Phase], ...] = ()
    """Phases that have ended, of requests that are watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load of an engine, by which routers place requests, and which operators see. Counters run from its start."""

    running: int
    waiting: int
    queued_prefill_tokens: int
    queued_pairs: int
    """Queued prompt tokens times the tokens that each of them attends to."""
    context_tokens: int
    """Tokens of all running sequences, as often as they are read: a shared prefix counts once for each sharer."""
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
    moves: int
    """Preemptions that gave sequences back, to go on on another worker."""
    host_cached_blocks: int
    """Names that host memory holds."""
    host_tokens_per_second: float
    """Tokens a second that host memory loads back to the device. 0 is unknown."""
    step_seconds: float
    """Seconds of all steps. The next fields count their work, as StepWork of proto/step_costs.py defines it."""
    steps: int
    prompt_steps: int
    step_prompt_tokens: int
    step_excess_tokens: int
    step_decodes: int
    step_context_tokens: int
    step_pairs: int
    pull_setup_seconds: float
    """Time of a pull without that of its bytes, and the rate at which its bytes arrive.

    Averages of the last pulls. 0 is unknown.
    """
    pull_bytes_per_second: float
    pulling_bytes: int
    """Bytes still to arrive from other workers, and still to be sent to them."""
    lending_bytes: int
    pulled_blocks: int
    lent_blocks: int
    failed_pulls: int
    adapters: tuple[ResidentAdapter, ...] = ()
    """The adapters that the device holds."""
    adapter_load_seconds: float = 0.0
    """Average time of the last loads of adapters. 0 is unknown."""
    adapter_loads: int = 0
