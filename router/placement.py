"""Which worker gets a request: a pure function of a snapshot.

    cost(worker) = queue_ms + prefill_ms + host_load_ms + decode_ms + memory_ms        least wins

Everything is an estimate of the time to the first token in milliseconds, so that terms add up and an operator
can argue with each (ExplainPlacement shows them). A worker that holds the prefix but is busy loses to an idle
one as soon as recomputing is faster than waiting: hot prefixes replicate by themselves.

Owns the arithmetic and the policies. Does not own what is known of workers (cluster_view.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from random import Random
from statistics import median

from blockyard.proto.prefix_index import WorkerId
from blockyard.router.placement_config import PlacementConfig, PolicyName

LEAST_TOKENS_PER_SECOND = 1e-3
"""A lower rate is no measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is believed of one worker that may take the request."""

    address: str
    """Where it listens; unique, which a worker id is not while an old life of it lingers."""
    worker_id: WorkerId
    cached_tokens: int = 0
    """Leading prompt tokens whose KV is on its GPU."""
    host_cached_tokens: int = 0
    """Those that follow them and are in its host memory."""
    queued_prefill_tokens: int = 0
    sequences: int = 0
    """Running and waiting."""
    used_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    prefill_tokens_per_second: float = 0.0
    """Measured; 0 until something was."""
    decode_tokens_per_second: float = 0.0
    """Of all its sequences together, in steps that only decode. Measured; 0 until something was."""
    host_tokens_per_second: float = 0.0
    """From host memory to the GPU. Measured; without it host memory is worth nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    prompt_tokens: int
    prefix_key: bytes = b""
    """The name of one of the prompt's first blocks: requests with the same one should meet without the index."""
    index_available: bool = True
    turn: int = 0
    """Counts placements up; what round_robin goes by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The terms of one candidate, in estimated milliseconds to the first token."""

    address: str
    worker_id: WorkerId
    cached_tokens: int
    host_cached_tokens: int
    """That would come from host memory; 0 where nobody knows how fast."""
    uncached_tokens: int
    """That would be computed."""
    queue_ms: float
    """Prefill of others that comes first."""
    prefill_ms: float
    """The part of this prompt that is not cached there."""
    host_load_ms: float
    """The part that comes from host memory, however slow: a worker loads what it finds there."""
    decode_ms: float
    """The decode steps of the sequences that are there, in part."""
    memory_ms: float

    @property
    def load_ms(self) -> float:
        """What the worker's load alone costs, whatever the prompt."""
        return self.queue_ms + self.decode_ms + self.memory_ms

    @property
    def total_ms(self) -> float:
        return self.load_ms + self.prefill_ms + self.host_load_ms

    @property
    def needed_tokens(self) -> int:
        """Of this prompt, that need new room in the pool."""
        return self.host_cached_tokens + self.uncached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    chosen: Score
    scores: tuple[Score, ...]
    """Every candidate's, cheapest first."""


def place(
    request: PlacementRequest,
    candidates: Sequence[Candidate],
    policy: PolicyName,
    rng: Random,
    weights: PlacementConfig | None = None,
) -> Placement:
    """Choose among at least one candidate. Raises ValueError without any."""
    if not candidates:
        raise ValueError("nothing to place on: no candidates")
    weights = weights or PlacementConfig()
    typical_rate = _typical_rate(candidates, weights)
    scores = [_score(request, candidate, typical_rate, weights) for candidate in candidates]
    match policy:
        case "round_robin":
            chosen = sorted(scores, key=lambda score: (score.worker_id, score.address))[
                request.turn % len(scores)
            ]
        case "least_loaded":
            chosen = _near_least(scores, [score.load_ms for score in scores], rng, weights)
        case "prefix" if request.index_available or not request.prefix_key:
            chosen = _near_least(scores, [score.total_ms for score in scores], rng, weights)
        case "prefix":
            chosen = _by_rendezvous(request.prefix_key, scores, rng, weights)
    return Placement(chosen=chosen, scores=tuple(sorted(scores, key=lambda score: score.total_ms)))


def _typical_rate(candidates: Sequence[Candidate], weights: PlacementConfig) -> float:
    rates = (candidate.prefill_tokens_per_second for candidate in candidates)
    measured = [rate for rate in rates if _is_measured(rate)]
    return median(measured) if measured else weights.assumed_prefill_tokens_per_second


def _is_measured(tokens_per_second: float) -> bool:
    """Workers may say anything; what is no rate counts as none."""
    return isfinite(tokens_per_second) and tokens_per_second >= LEAST_TOKENS_PER_SECOND


def _score(
    request: PlacementRequest, candidate: Candidate, typical_rate: float, weights: PlacementConfig
) -> Score:
    own_rate = candidate.prefill_tokens_per_second
    tokens_per_ms = (own_rate if _is_measured(own_rate) else typical_rate) / 1000
    needed_tokens = max(request.prompt_tokens - candidate.cached_tokens, 0)
    host_rate = candidate.host_tokens_per_second
    host_tokens = min(candidate.host_cached_tokens, needed_tokens) if _is_measured(host_rate) else 0
    uncached_tokens = needed_tokens - host_tokens
    return Score(
        address=candidate.address,
        worker_id=candidate.worker_id,
        cached_tokens=candidate.cached_tokens,
        host_cached_tokens=host_tokens,
        uncached_tokens=uncached_tokens,
        queue_ms=candidate.queued_prefill_tokens / tokens_per_ms,
        prefill_ms=uncached_tokens / tokens_per_ms,
        host_load_ms=1000 * host_tokens / host_rate if host_tokens else 0.0,
        decode_ms=candidate.sequences * _sequence_ms(candidate, weights),
        memory_ms=_memory_ms(needed_tokens, candidate, weights),
    )


def _sequence_ms(candidate: Candidate, weights: PlacementConfig) -> float:
    if _is_measured(candidate.decode_tokens_per_second):
        return weights.decode_step_fraction * 1000 / candidate.decode_tokens_per_second
    return weights.decode_ms_per_sequence


def _memory_ms(needed_tokens: int, candidate: Candidate, weights: PlacementConfig) -> float:
    """Zero while the pool stays roomy, then rising linearly to the full price where the request no longer fits."""
    if candidate.total_blocks == 0:
        return 0.0
    needed_blocks = -(-needed_tokens // candidate.block_size)
    free_fraction = 1 - (candidate.used_blocks + needed_blocks) / candidate.total_blocks
    shortage = (weights.memory_free_fraction - free_fraction) / weights.memory_free_fraction
    return weights.memory_full_ms * min(max(shortage, 0.0), 1.0)


def _near_least(
    scores: Sequence[Score], costs_ms: Sequence[float], rng: Random, weights: PlacementConfig
) -> Score:
    least = min(costs_ms)
    limit = least + max(weights.near_equal_ms, weights.near_equal_fraction * least)
    return rng.choice([score for score, cost in zip(scores, costs_ms, strict=True) if cost <= limit])


def _by_rendezvous(
    prefix_key: bytes, scores: Sequence[Score], rng: Random, weights: PlacementConfig
) -> Score:
    """Without the index, equal prefixes still meet: each key has its own order of the workers, and the first
    two of it serve the key. Once both are loaded anyone may, by cost."""

    def rank(score: Score) -> bytes:
        return sha256(prefix_key + score.worker_id.encode()).digest()

    for score in sorted(scores, key=rank)[:2]:
        if score.load_ms <= weights.loaded_ms:
            return score
    return _near_least(scores, [score.total_ms for score in scores], rng, weights)
