"""Which worker gets a request: a pure function of a snapshot.

- `prefix`: the least total_ms. A worker that holds the prefix but is busy loses to an idle one as soon as recomputing
  is faster than waiting: hot prefixes replicate by themselves. Among near-equals the one that served the session last
  wins, else chance. Without the index, rendezvous hashing of the session or the prefix between two workers.
- `round_robin`: in turn.
- `least_loaded`: the least load_ms, whatever is cached.
- `two_choices`: of two at random the one with less load_ms (Mitzenmacher 1996).
- `session`: rendezvous hashing of the session over all workers, past those that are loaded; without a session by load.
- `dynamo`: the published cost of NVIDIA Dynamo's KV router, as a yardstick.

Owns the policies. Does not own the arithmetic of the terms (scoring.py) nor what is known of workers (cluster/view.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import exp
from random import Random

from blockyard.proto.index.contract import WorkerId
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.placement.scoring import Candidate, Score, score_all


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    prompt_tokens: int
    prefix_key: bytes = b""
    """The name of one of the prompt's first blocks: requests with the same one should meet without the index."""
    index_available: bool = True
    turn: int = 0
    """Counts placements up; what round_robin goes by."""
    session_key: bytes = b""
    """The conversation that the request belongs to; empty: none."""
    session_worker: WorkerId | None = None
    """Who served the session last, as far as this router knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    chosen: Score
    considered: Sequence[Score]
    costs: Sequence[float]
    """What the policy compared, for each of those."""

    @property
    def scores(self) -> tuple[Score, ...]:
        """Every candidate's, cheapest first. Made when asked for: to place a request takes none but the chosen."""
        priced = (score._replace(cost=cost) for score, cost in zip(self.considered, self.costs, strict=True))
        return tuple(sorted(priced, key=lambda score: score.cost))


def place(
    request: PlacementRequest,
    candidates: Sequence[Candidate],
    policy: PolicyName,
    rng: Random,
    config: PlacementConfig | None = None,
) -> Placement:
    """Choose among at least one candidate. Raises ValueError without any."""
    if not candidates:
        raise ValueError("nothing to place on: no candidates")
    config = config or PlacementConfig()
    scores = score_all(request.prompt_tokens, candidates, config)
    match policy:
        case "prefix":
            chosen, costs = _prefix(request, scores, rng, config)
        case "round_robin":
            chosen, costs = _round_robin(request.turn, scores)
        case "least_loaded":
            chosen, costs = _least_loaded(scores, rng, config)
        case "two_choices":
            chosen, costs = _two_choices(scores, rng)
        case "session":
            chosen, costs = _session(request.session_key, scores, rng, config)
        case "dynamo":
            chosen, costs = _dynamo(scores, candidates, rng, config)
    return Placement(chosen=scores[chosen]._replace(cost=costs[chosen]), considered=scores, costs=costs)


Choice = tuple[int, list[float]]
"""The number of the chosen score, and every score's cost."""


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
    return rng.choice(favourites or near), costs


def _least_loaded(scores: Sequence[Score], rng: Random, config: PlacementConfig) -> Choice:
    costs = [score.load_ms for score in scores]
    return rng.choice(_near_least(costs, config)), costs


def _near_least(costs: Sequence[float], config: PlacementConfig) -> list[int]:
    least = min(costs)
    limit = least + max(config.near_equal_ms, config.near_equal_fraction * least)
    return [number for number, cost in enumerate(costs) if cost <= limit]


def _two_choices(scores: Sequence[Score], rng: Random) -> Choice:
    costs = [score.load_ms for score in scores]
    return min(rng.sample(range(len(scores)), min(2, len(scores))), key=costs.__getitem__), costs


def _round_robin(turn: int, scores: Sequence[Score]) -> Choice:
    """The cost is how many turns away a worker is."""
    order = sorted(range(len(scores)), key=lambda number: (scores[number].worker_id, scores[number].address))
    costs = [0.0] * len(scores)
    for place, number in enumerate(order):
        costs[number] = float((place - turn) % len(order))
    return costs.index(0.0), costs


def _session(key: bytes, scores: Sequence[Score], rng: Random, config: PlacementConfig) -> Choice:
    by_hash = _by_rendezvous(key, scores, len(scores), config) if key else None
    return by_hash or _least_loaded(scores, rng, config)


def _by_rendezvous(
    key: bytes, scores: Sequence[Score], num_homes: int, config: PlacementConfig
) -> Choice | None:
    """Equal keys meet without anybody's memory: each key has its own order of the workers, and the first of it serve
    the key. What they cost is their place in that order, loaded ones and the rest after all others. None if every home
    is loaded: then anyone may, by cost.

    Losing a worker moves only its own keys (Thaler and Ravishankar 1998).
    """
    order = sorted(
        range(len(scores)), key=lambda number: sha256(key + scores[number].worker_id.encode()).digest()
    )
    costs = [0.0] * len(scores)
    for place, number in enumerate(order):
        is_home = place < num_homes and scores[number].load_ms <= config.loaded_ms
        costs[number] = float(place if is_home else place + len(order))
    least = min(costs)
    return (costs.index(least), costs) if least < len(order) else None


def _dynamo(
    scores: Sequence[Score], candidates: Sequence[Candidate], rng: Random, config: PlacementConfig
) -> Choice:
    """`cost = overlap_score_weight * prefill_blocks + decode_blocks` of Dynamo's documentation, "Router Design: Cost
    Calculation" (docs/design_docs/router_design.md, 0.8 to 1.1). In ai-dynamo-runtime 1.6.1 the weight is called
    `prefill_load_scale`, and with the other defaults of its KvRouterConfig the cost is the same.

    Prefill: what is queued there and this prompt's uncached tokens, in blocks. Decode: blocks in use there and those
    that this request adds; Dynamo also counts the cached ones that it takes into use again, which a load report does
    not tell apart. With a temperature, costs are rescaled to 0..1 and drawn from by softmax; of equal ones chance
    decides, where Dynamo first looks for the smaller tree.
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
