"""Placement policies: choose a worker for a request, as a pure function of a snapshot.

- `prefix`: the least total_ms. A busy worker with the prefix loses to an idle one as soon as recomputing is faster than
  waiting, so hot prefixes replicate. Among near-equal workers the one that last served the session wins. Else
  rendezvous hashing of the prompt's uncached part chooses, so all routers send new prefixes to the same worker.
  Without the index: rendezvous hashing of the session or the prefix among `prefix_homes` workers.
- `round_robin`: in turn.
- `least_loaded`: the least load_ms: queue, decodes and memory.
- `two_choices`: of two random workers the one with less load_ms (Mitzenmacher 1996).
- `session`: rendezvous hashing of the session over all workers, except loaded ones. Without a session, or if all are
  loaded: as `least_loaded`.
- `dynamo`: the published cost of NVIDIA Dynamo's KV router, as a reference.

Owns the policies. Does not own the terms of the cost, such as load_ms (scoring.py), or the state of workers
(cluster/known_workers.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import exp
from random import Random

from blockyard.proto.index.contract import WorkerId
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.placement.pulls import PullSource
from blockyard.router.placement.scoring import Candidate, Score, score_all, tie_ms
from blockyard.router.placement.splits import Beginner, Split, able, best_split


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    prompt_tokens: int
    prefix_key: bytes = b""
    """Name of one of the prompt's first blocks. Without the index, requests with the same key prefer the same
    workers."""
    fresh_key: bytes = b""
    """Name of the first blocks of the prompt that no worker has cached. Near-equal workers are chosen by its hash."""
    index_available: bool = True
    num_placements: int = 0
    """Number of placements that the router has made before, for round_robin."""
    session_key: bytes = b""
    """Id of the request's conversation. Empty: none."""
    session_worker: WorkerId | None = None
    """The worker that last served the session, as far as this router knows."""
    is_continued: bool = False
    """Whether another worker has begun it and given it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    chosen: Score
    considered: Sequence[Score]
    costs: Sequence[float]
    """Costs that the policy compared, in its own unit, one per considered score."""
    candidates: Sequence[Candidate] = ()
    sources: Sequence[PullSource] = ()
    """Workers from which the chosen one might fetch."""
    split: Split | None = None
    """The cheapest split. If it is chosen, `chosen` begins the request and another worker continues it."""

    @property
    def is_split(self) -> bool:
        return self.split is not None and self.split.is_chosen

    @property
    def scores(self) -> tuple[Score, ...]:
        """Return the scores of all candidates with the policy's costs, cheapest first.

        Computed on demand: placing a request needs only the chosen one.
        """
        priced = (score._replace(cost=cost) for score, cost in zip(self.considered, self.costs, strict=True))
        return tuple(sorted(priced, key=lambda score: score.cost))


def place(
    request: PlacementRequest,
    candidates: Sequence[Candidate],
    policy: PolicyName,
    rng: Random,
    config: PlacementConfig | None = None,
    sources: Sequence[PullSource] = (),
    beginners: Sequence[Beginner] = (),
) -> Placement:
    """Score the candidates and choose one by the policy. Raises ValueError if there are none.

    Under `prefix` the chosen worker may fetch a part of the prompt from one of the `sources`. One of the `beginners`
    may begin the request instead, for a candidate to continue (splits.py).
    """
    if not candidates:
        raise ValueError("nothing to place on: no candidates")
    config = config or PlacementConfig()
    sources = sources if policy == "prefix" else ()
    everyone = candidates
    may_serve = able(request.prompt_tokens, everyone, is_continued=request.is_continued)
    candidates = may_serve or everyone
    scores = score_all(request.prompt_tokens, candidates, config, sources)
    match policy:
        case "prefix":
            chosen, costs = _prefix(request, scores, rng, config)
        case "round_robin":
            chosen, costs = _round_robin(request.num_placements, scores)
        case "least_loaded":
            chosen, costs = _least_loaded(scores, rng, config)
        case "two_choices":
            chosen, costs = _two_choices(scores, rng)
        case "session":
            chosen, costs = _session(request.session_key, scores, rng, config)
        case "dynamo":
            chosen, costs = _dynamo(scores, candidates, rng, config)
    split = None
    if beginners and policy == "prefix":
        local = scores[chosen] if may_serve else None
        split = best_split(request.prompt_tokens, beginners, everyone, config, sources, local=local)
    return Placement(
        chosen=split.prefill
        if split is not None and split.is_chosen
        else scores[chosen]._replace(cost=costs[chosen]),
        considered=scores,
        costs=costs,
        candidates=candidates,
        sources=sources,
        split=split,
    )


Choice = tuple[int, list[float]]
"""Index of the chosen score, and the costs of all scores in their order."""


def _prefix(
    request: PlacementRequest, scores: Sequence[Score], rng: Random, config: PlacementConfig
) -> Choice:
    key = request.session_key or request.prefix_key
    if key and not request.index_available:
        by_hash = _by_rendezvous(key, scores, config.prefix_homes, config)
        if by_hash is not None:
            return by_hash
    costs = [score.cost for score in scores]
    near = _near_least(costs, config)
    favourites = [number for number in near if scores[number].worker_id == request.session_worker]
    if not favourites and request.fresh_key:
        return min(near, key=lambda number: _rank(request.fresh_key, scores[number])), costs
    return rng.choice(favourites or near), costs


def _least_loaded(scores: Sequence[Score], rng: Random, config: PlacementConfig) -> Choice:
    costs = [score.load_ms for score in scores]
    return rng.choice(_near_least(costs, config)), costs


def _near_least(costs: Sequence[float], config: PlacementConfig) -> list[int]:
    least = min(costs)
    limit = least + tie_ms(least, config)
    return [number for number, cost in enumerate(costs) if cost <= limit]


def _two_choices(scores: Sequence[Score], rng: Random) -> Choice:
    costs = [score.load_ms for score in scores]
    return min(rng.sample(range(len(scores)), min(2, len(scores))), key=costs.__getitem__), costs


def _round_robin(num_placements: int, scores: Sequence[Score]) -> Choice:
    """Choose the next worker in turn. The cost is the number of placements until a worker's turn."""
    order = sorted(range(len(scores)), key=lambda number: (scores[number].worker_id, scores[number].address))
    costs = [0.0] * len(scores)
    for position, number in enumerate(order):
        costs[number] = float((position - num_placements) % len(order))
    return costs.index(0.0), costs


def _session(key: bytes, scores: Sequence[Score], rng: Random, config: PlacementConfig) -> Choice:
    by_hash = _by_rendezvous(key, scores, len(scores), config) if key else None
    return by_hash or _least_loaded(scores, rng, config)


def _by_rendezvous(
    key: bytes, scores: Sequence[Score], num_homes: int, config: PlacementConfig
) -> Choice | None:
    """Choose by rendezvous hashing, which sends equal keys to the same worker on every router. Return None if every
    worker that serves the key is loaded.

    Each key has its own order of the workers, and the first `num_homes` of it serve the key. The cost is a worker's
    position in that order. Loaded ones, and workers that do not serve the key, come last.

    Losing a worker moves only its own keys (Thaler and Ravishankar 1998).
    """
    order = sorted(range(len(scores)), key=lambda number: _rank(key, scores[number]))
    costs = [0.0] * len(scores)
    for position, number in enumerate(order):
        is_home = position < num_homes and scores[number].load_ms <= config.loaded_ms
        costs[number] = float(position if is_home else position + len(order))
    least = min(costs)
    return (costs.index(least), costs) if least < len(order) else None


def _rank(key: bytes, score: Score) -> bytes:
    """Return the value by which a key orders the workers, in its own way but alike on every router."""
    return sha256(key + score.worker_id.encode()).digest()


def _dynamo(
    scores: Sequence[Score], candidates: Sequence[Candidate], rng: Random, config: PlacementConfig
) -> Choice:
    """Choose by NVIDIA Dynamo's cost: `overlap_score_weight * prefill_blocks + decode_blocks`.

    Source: Dynamo's documentation, "Router Design: Cost Calculation" (docs/design_docs/router_design.md, 0.8 to 1.1).
    In ai-dynamo-runtime 1.6.1 the weight is called `prefill_load_scale`. With the other defaults of its KvRouterConfig
    the cost is the same.

    Prefill blocks are the queued prefill and this prompt's uncached tokens. Decode blocks are the blocks in use and
    those that this request adds. Dynamo also counts cached blocks that the request uses again, which a load report does
    not show. With a temperature, costs are scaled to 0..1 and softmax gives the chances. Equal costs are drawn at
    random, where Dynamo prefers the smaller tree.
    """
    costs = [
        config.dynamo_overlap_score_weight
        * (candidate.queued_prefill_tokens + score.uncached_tokens)
        / candidate.block_size
        + candidate.used_blocks
        + -(-score.needed_tokens // candidate.block_size)
        for score, candidate in zip(scores, candidates, strict=True)
    ]
    least, most = min(costs), max(costs)
    if config.dynamo_temperature == 0 or least == most:
        return rng.choice([number for number, cost in enumerate(costs) if cost == least]), costs
    chances = [exp((least - cost) / (most - least) / config.dynamo_temperature) for cost in costs]
    return rng.choices(range(len(costs)), chances)[0], costs
