"""Scores: the estimated cost of a request on each worker, by arithmetic over a snapshot.

    total_ms = queue_ms + prefill_ms + host_load_ms + pull_ms + decode_ms + memory_ms + adapter_ms + interference_ms

All terms but the last estimate parts of the time to the first token, in milliseconds. So they add up, and operators can
check each of them (ExplainPlacement shows them). The last term is the delay that this prefill causes to the sequences
on the worker, and to requests that come later. With its full weight (`others_fraction=1`), a choice minimises the cost
of all requests together, not only its own.

A worker may fetch a prefix from another one that has more of it, where that pays for the request itself
(`PullPlan.pays`). To others a pulled prefix costs as much as a computed one. Its copy takes room from what they have
cached, and its context slows their steps. Otherwise long prompts would be pulled to the worker that has most short
ones. A worker whose memory is short fetches nothing, since the copy would make others wait for room.

Does not own the time of a pull (pulls.py) or the cost of an adapter (adapters.py). Nor does it own the choice among the
costs (policies.py) or the state of workers (cluster/known_workers.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

from blockyard.proto.index.contract import WorkerId
from blockyard.proto.roles import Role
from blockyard.proto.step_costs import pairs_of
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.pulls import (
    UNKNOWN_LINK,
    Link,
    PullOption,
    PullPlan,
    PullSource,
    PullVerdict,
)
from blockyard.router.placement.rates import is_measured


class Candidate(NamedTuple):
    """State of one worker that may take the request.

    A tuple, as is Score: every placement makes one for each worker, and a frozen dataclass takes twice as long.
    """

    address: str
    """Address of the worker, which is unique. A worker id may have two incarnations for a while."""
    worker_id: WorkerId
    cached_tokens: int = 0
    """Number of leading prompt tokens whose KV is on its GPU."""
    host_cached_tokens: int = 0
    """Number of prompt tokens that directly follow those, whose KV is in its host memory."""
    queued_prefill_tokens: int = 0
    """Prompt tokens of other requests that it has yet to compute."""
    queued_pairs: int = 0
    """Pairs: those tokens times the tokens that each of them attends to."""
    sequences: int = 0
    """Running and waiting sequences."""
    context_tokens: int = 0
    """Context tokens that its sequences' decode steps read. A shared prefix counts once per sequence."""
    used_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    prefill_tokens_per_second: float = 0.0
    """Trusted prefill rate (rates.py), without attention. 0 until measured."""
    pair_tokens: float = 0.0
    """Time of a pair (a prompt token and a token that it attends to), as a part of the time of a prompt token."""
    decode_step_ms: float = 0.0
    """Trusted time of a step that decodes its sequences. 0 until measured."""
    host_tokens_per_second: float = 0.0
    """Measured rate from host memory to the GPU. If it is 0, host memory is ignored."""
    link: Link = UNKNOWN_LINK
    """How blocks reach it from other workers."""
    role: Role = "both"
    """The part of a request that it is meant for (splits.py)."""
    adapter_ms: float = 0.0
    """Cost of loading the request's LoRA adapter there (adapters.py). 0: it has it, or the request names none."""
    kind: int = 0
    """Number of the kind of its blocks. It fetches none of another kind."""


class Score(NamedTuple):
    """Terms of one candidate's cost, in milliseconds, and the tokens from which they follow."""

    address: str
    worker_id: WorkerId
    cached_tokens: int
    host_cached_tokens: int
    """Prompt tokens to load from host memory. 0 if its rate is unknown."""
    uncached_tokens: int
    """Prompt tokens to compute."""
    queue_ms: float
    """Time of the queued prefill of other requests."""
    prefill_ms: float
    """Time to compute the uncached part of this prompt."""
    host_load_ms: float
    """Time to load from host memory, even where computing is faster: a worker loads whatever it finds there."""
    pull_ms: float
    """Time to fetch blocks from another worker, beyond the wait for the queue."""
    decode_ms: float
    """Delay by the decode steps of present sequences: a part of such a step, and a price for all context that they
    read."""
    memory_ms: float
    """Price of a pool that is nearly full once it holds this request."""
    interference_ms: float
    """Part of the delay that this prompt's prefill causes to present sequences and to later requests. Pulled tokens
    count as if they were computed."""
    cost: float
    """Value that the policy compares, in its own unit. The least wins.

    Under `prefix` it is total_ms, or the position in the order of workers by which rendezvous hashing chose.
    """
    pulled_tokens: int = 0
    """Prompt tokens to fetch from another worker. They count neither as host-cached nor as uncached."""
    pull: PullPlan | None = None
    """None: nothing is fetched."""
    adapter_ms: float = 0.0
    """Time to load the request's LoRA adapter, and the price of what it evicts."""

    @property
    def load_ms(self) -> float:
        """Return the cost of the worker's queue, decodes and memory, without that of computing or loading this
        prompt."""
        return self.queue_ms + self.decode_ms + self.memory_ms

    @property
    def total_ms(self) -> float:
        bare_ms = self.load_ms + self.prefill_ms + self.host_load_ms + self.pull_ms + self.interference_ms
        return bare_ms + self.adapter_ms

    @property
    def needed_tokens(self) -> int:
        """Return how many prompt tokens need new blocks in the worker's pool."""
        return self.host_cached_tokens + self.pulled_tokens + self.uncached_tokens


def score_all(
    prompt_tokens: int,
    candidates: Sequence[Candidate],
    config: PlacementConfig,
    sources: Sequence[PullSource] = (),
) -> list[Score]:
    """Return the candidates' scores in their order, with total_ms as cost. Each may fetch from one of the sources."""
    if not sources:
        return [_score(prompt_tokens, candidate, config) for candidate in candidates]
    return [best_score(prompt_tokens, candidate, config, sources) for candidate in candidates]


def best_score(
    prompt_tokens: int, candidate: Candidate, config: PlacementConfig, sources: Sequence[PullSource]
) -> Score:
    """Return the score without a pull, or that with the best one that pays."""
    alone = _score(prompt_tokens, candidate, config)
    if not _can_pull(candidate) or alone.memory_ms:
        return alone
    tie = tie_ms(alone.cost, config)
    pulling = [
        score
        for source in _quickest(_richer(alone, candidate, sources), candidate.link)
        for score, plan in [_pulling(prompt_tokens, candidate, config, source, alone)]
        if plan.pays(tie)
    ]
    return min(pulling, key=lambda score: score.cost, default=alone)


def _quickest(sources: Sequence[PullSource], link: Link) -> Sequence[PullSource]:
    """Return the sources without those that have as much as a quicker one."""
    if len(sources) < 2:
        return sources
    by_time = sorted(sources, key=lambda source: link.time_ms(0, source), reverse=True)
    return tuple({source.cached_tokens: source for source in by_time}.values())


def _pulling(
    prompt_tokens: int, candidate: Candidate, config: PlacementConfig, source: PullSource, alone: Score
) -> tuple[Score, PullPlan]:
    """Return the score with a pull, and the pull. The pull saves what `alone` costs more."""
    score = _score(prompt_tokens, candidate, config, source)
    assert score.pull is not None, "it has a source"
    plan = score.pull._replace(saved_ms=alone.cost - score.cost)
    return score._replace(pull=plan), plan


def _can_pull(candidate: Candidate) -> bool:
    return is_measured(candidate.link.bytes_per_ms) and is_measured(candidate.host_tokens_per_second)


def _richer(alone: Score, candidate: Candidate, sources: Sequence[PullSource]) -> list[PullSource]:
    """Return the sources of the candidate's kind that have more of the prompt than it."""
    here = alone.cached_tokens + alone.host_cached_tokens
    return [
        source
        for source in sources
        if source.cached_tokens > here
        and source.kind == candidate.kind
        and source.address != candidate.address
    ]


def pull_options(
    prompt_tokens: int, candidate: Candidate, config: PlacementConfig, sources: Sequence[PullSource]
) -> list[PullOption]:
    """Return each source that has more of the prompt than the candidate, with the reason why it is chosen or not."""
    alone = _score(prompt_tokens, candidate, config)
    richer = _richer(alone, candidate, sources)
    if not _can_pull(candidate):
        return [PullOption(source, PullVerdict.UNMEASURED) for source in richer]
    if alone.memory_ms:
        return [PullOption(source, PullVerdict.MEMORY) for source in richer]
    chosen = best_score(prompt_tokens, candidate, config, sources).pull
    options = []
    for source in richer:
        score, plan = _pulling(prompt_tokens, candidate, config, source, alone)
        if chosen is not None and chosen.source == source:
            verdict = PullVerdict.CHOSEN
        elif plan.pays(tie_ms(alone.cost, config)):
            verdict = PullVerdict.OTHER_SOURCE
        else:
            verdict = PullVerdict.TIE
        options.append(PullOption(source, verdict, score.pulled_tokens, plan.time_ms, plan.saved_ms))
    return options


def tie_ms(cost: float, config: PlacementConfig) -> float:
    """Return by how much another cost may be larger or smaller and still count as equal."""
    return max(config.near_equal_ms, config.near_equal_fraction * cost)


def _score(
    prompt_tokens: int, candidate: Candidate, config: PlacementConfig, source: PullSource | None = None
) -> Score:
    own_rate = candidate.prefill_tokens_per_second
    tokens_per_ms = (own_rate if is_measured(own_rate) else config.assumed_prefill_tokens_per_second) / 1000
    pair_tokens = candidate.pair_tokens
    needed_tokens = max(prompt_tokens - candidate.cached_tokens, 0)
    host_rate = candidate.host_tokens_per_second
    host_tokens = min(candidate.host_cached_tokens, needed_tokens) if is_measured(host_rate) else 0
    pulled_tokens = 0
    if source is not None:
        pulled_tokens = min(source.cached_tokens - candidate.cached_tokens, needed_tokens) - host_tokens
    uncached_tokens = needed_tokens - host_tokens - pulled_tokens
    queue_ms = (candidate.queued_prefill_tokens + pair_tokens * candidate.queued_pairs) / tokens_per_ms

    def computing_ms(tokens: int) -> float:
        """Return the time to compute the last tokens of the prompt."""
        return (tokens + pair_tokens * pairs_of(prompt_tokens - tokens, tokens)) / tokens_per_ms

    prefill_ms = computing_ms(uncached_tokens)
    taken_ms = computing_ms(uncached_tokens + pulled_tokens) if pulled_tokens else prefill_ms
    loaded_tokens = host_tokens + pulled_tokens
    host_load_ms = 1000 * loaded_tokens / host_rate if loaded_tokens else 0.0
    decode_ms = (
        _decode_step_ms(candidate, config)
        + config.context_fraction * candidate.context_tokens / tokens_per_ms
    )
    memory_ms = _memory_ms(needed_tokens, candidate, config)
    interference_ms = (config.later_fraction + config.others_fraction * candidate.sequences) * taken_ms
    pull, pull_ms = None, 0.0
    if source is not None:
        pull = _plan(candidate, source, pulled_tokens)
        pull_ms = max(pull.time_ms - queue_ms, 0.0)
    cost = queue_ms + decode_ms + memory_ms + prefill_ms + host_load_ms + pull_ms + interference_ms
    return Score(
        address=candidate.address,
        worker_id=candidate.worker_id,
        cached_tokens=candidate.cached_tokens,
        host_cached_tokens=host_tokens,
        uncached_tokens=uncached_tokens,
        queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        host_load_ms=host_load_ms,
        decode_ms=decode_ms,
        memory_ms=memory_ms,
        interference_ms=interference_ms,
        pull_ms=pull_ms,
        cost=cost + candidate.adapter_ms,
        pulled_tokens=pulled_tokens,
        pull=pull,
        adapter_ms=candidate.adapter_ms,
    )


def _plan(candidate: Candidate, source: PullSource, pulled_tokens: int) -> PullPlan:
    link, block_size = candidate.link, candidate.block_size
    return PullPlan(
        source=source,
        num_blocks=source.cached_tokens // block_size,
        num_bytes=int(pulled_tokens * link.token_bytes),
        time_ms=link.time_ms(pulled_tokens, source),
        saved_ms=0.0,
    )


def _decode_step_ms(candidate: Candidate, config: PlacementConfig) -> float:
    if is_measured(candidate.decode_step_ms):
        return config.decode_step_fraction * candidate.decode_step_ms
    return config.decode_ms_per_sequence * candidate.sequences


def _memory_ms(needed_tokens: int, candidate: Candidate, config: PlacementConfig) -> float:
    """Return the price of memory: 0 while the pool has room, rising linearly to the full price where this request no
    longer fits."""
    if candidate.total_blocks == 0:
        return 0.0
    needed_blocks = -(-needed_tokens // candidate.block_size)
    free_fraction = 1 - (candidate.used_blocks + needed_blocks) / candidate.total_blocks
    shortage = (config.memory_free_fraction - free_fraction) / config.memory_free_fraction
    return config.memory_full_ms * min(max(shortage, 0.0), 1.0)
