"""Invariants of placement for every snapshot, however odd: workers and networks can send any report."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from random import Random
from typing import Any

import pytest
from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.placement.policies import PlacementRequest, place
from blockyard.router.placement.pulls import LEAST_GAIN, Link, PullSource, PullVerdict
from blockyard.router.placement.rates import is_measured
from blockyard.router.placement.scoring import Candidate, Score, pull_options, score_all, tie_ms
from hypothesis import given
from hypothesis import strategies as st

from .placements import CANDIDATE, CANDIDATES, CONFIGS, COUNTS, POLICIES, REQUESTS, SOURCES


@pytest.mark.parametrize("policy", POLICIES)
@given(REQUESTS, CANDIDATES, CONFIGS, SOURCES)
def test_whatever_workers_report_one_is_chosen_and_every_cost_is_a_number(
    policy: PolicyName,
    request_: PlacementRequest,
    candidates: list[Candidate],
    config: PlacementConfig,
    sources: list[PullSource],
) -> None:
    placement = place(request_, candidates, policy, Random(0), config, sources)
    scores = placement.scores
    assert sorted(score.address for score in scores) == sorted(c.address for c in candidates)
    assert placement.chosen in scores
    assert all(isfinite(score.cost) and isfinite(score.total_ms) and score.cost >= 0 for score in scores)
    assert [score.cost for score in scores] == sorted(score.cost for score in scores)


@given(st.integers(1, 2**32), CANDIDATE, SOURCES, CONFIGS)
def test_the_explained_source_is_the_planned_one_and_each_other_one_has_its_reason(
    prompt_tokens: int, candidate: Candidate, sources: list[PullSource], config: PlacementConfig
) -> None:
    (score,) = score_all(prompt_tokens, [candidate], config, sources)
    (without,) = score_all(prompt_tokens, [candidate], config)
    options = pull_options(prompt_tokens, candidate, config, sources)
    chosen = [option for option in options if option.verdict is PullVerdict.CHOSEN]
    assert [option.source for option in chosen] == ([] if score.pull is None else [score.pull.source])
    for option in options:
        assert option.source.cached_tokens > without.cached_tokens + without.host_cached_tokens
        match option.verdict:
            case PullVerdict.CHOSEN:
                assert option.pulled_tokens == score.pulled_tokens
            case PullVerdict.TIE:
                assert not option.saved_ms > max(tie_ms(without.cost, config), LEAST_GAIN * option.time_ms)
            case PullVerdict.OTHER_SOURCE:
                assert score.pull is not None
                assert option.saved_ms <= score.pull.saved_ms
            case PullVerdict.MEMORY:
                assert score.pull is None
                assert score.memory_ms > 0
            case PullVerdict.UNMEASURED:
                assert score.pull is None
                assert option.pulled_tokens == 0


@given(CANDIDATES, COUNTS, CONFIGS, SOURCES)
def test_a_pull_is_planned_only_where_it_pays_for_the_request_and_others_lose_nothing(
    candidates: list[Candidate], prompt_tokens: int, config: PlacementConfig, sources: list[PullSource]
) -> None:
    alone = score_all(prompt_tokens, candidates, config)
    both = score_all(prompt_tokens, candidates, config, sources)
    for candidate, without, score in zip(candidates, alone, both, strict=True):
        if score.pull is None:
            assert score == without
            continue
        assert score.pull.saved_ms == without.cost - score.cost
        assert score.pull.saved_ms > max(tie_ms(without.cost, config), LEAST_GAIN * score.pull.time_ms)
        assert score.interference_ms == without.interference_ms
        assert score.pull.source in sources
        assert 0 < score.pulled_tokens <= score.pull.source.cached_tokens - candidate.cached_tokens
        assert score.pull.time_ms >= candidate.link.setup_ms
        assert score.pull_ms <= score.pull.time_ms < score.pull.patience_seconds * 1000
        tokens = score.cached_tokens + score.host_cached_tokens + score.pulled_tokens + score.uncached_tokens
        assert tokens == max(prompt_tokens, score.cached_tokens)
        assert score.needed_tokens == without.needed_tokens


@given(CANDIDATE, COUNTS, CONFIGS, SOURCES, st.floats(1, 1e6))
def test_a_pull_that_pays_also_pays_over_a_faster_link(candidate, prompt_tokens, config, sources, factor):
    (slow,) = score_all(prompt_tokens, [candidate], config, sources)
    link = candidate.link._replace(bytes_per_ms=candidate.link.bytes_per_ms * factor)
    (fast,) = score_all(prompt_tokens, [candidate._replace(link=link)], config, sources)
    if slow.pull is not None and is_measured(link.bytes_per_ms):
        assert fast.pull is not None
        assert fast.cost <= slow.cost


@given(CANDIDATES, COUNTS, CONFIGS, SOURCES)
def test_sources_that_have_no_more_than_the_workers_change_nothing(
    candidates: list[Candidate], prompt_tokens: int, config: PlacementConfig, sources: list[PullSource]
) -> None:
    """Prompts that share nothing are placed as without pulls."""
    least = min(candidate.cached_tokens for candidate in candidates)
    poor = [source._replace(cached_tokens=min(source.cached_tokens, least)) for source in sources]
    assert score_all(prompt_tokens, candidates, config, poor) == score_all(prompt_tokens, candidates, config)


@given(st.integers(1000, 100_000), st.integers(0, 255), CONFIGS)
def test_a_pulled_prompt_avoids_many_short_ones_as_a_computed_one_does(prompt_tokens, sequences, config):
    """Two workers that differ in their sequences alone differ in their cost as much with a pull as without."""
    link = Link(setup_ms=1.0, bytes_per_ms=1e9, token_bytes=100_000.0)
    few, many = (
        Candidate(
            address=str(number),
            worker_id=WorkerId(str(number)),
            sequences=number,
            prefill_tokens_per_second=40_000.0,
            pair_tokens=1e-5,
            host_tokens_per_second=1e6,
            link=link,
        )
        for number in (sequences, sequences + 1)
    )
    source = PullSource(
        WorkerId("s"), Incarnation("i"), "source", "t", cached_tokens=(prompt_tokens - 1) // 16 * 16
    )
    without = score_all(prompt_tokens, [few, many], config)
    pulling = score_all(prompt_tokens, [few, many], config, [source])
    if all(score.pull is not None for score in pulling):
        assert pulling[1].cost - pulling[0].cost == pytest.approx(without[1].cost - without[0].cost)


class Chooser(Random):
    """Chooser that remembers the options among which it chose last."""

    offered: list[Any]

    def choice(self, options: Any) -> Any:
        self.offered = list(options)
        return super().choice(options)


@given(CANDIDATES, COUNTS, CONFIGS, st.randoms(use_true_random=False))
def test_a_winner_is_near_the_least_cost_and_the_order_of_candidates_is_nothing(
    candidates: list[Candidate], prompt_tokens: int, config: PlacementConfig, shuffler: Random
) -> None:
    request = PlacementRequest(prompt_tokens=prompt_tokens)

    def winners(given_order: list[Candidate]) -> set[str]:
        chooser = Chooser()
        placement = place(request, given_order, "prefix", chooser, config)
        least = placement.scores[0].total_ms
        limit = least + max(config.near_equal_ms, config.near_equal_fraction * least)
        eligible = {score.address for score in placement.scores if score.total_ms <= limit}
        assert placement.chosen.address in eligible
        assert {given_order[number].address for number in chooser.offered} == eligible
        return eligible

    shuffled = list(candidates)
    shuffler.shuffle(shuffled)
    assert winners(candidates) == winners(shuffled)


@given(REQUESTS, CANDIDATES, CONFIGS)
def test_a_sessions_worker_never_wins_against_more_than_a_tie(request_, candidates, config):
    placement = place(replace(request_, index_available=True), candidates, "prefix", Random(0), config)
    least = placement.scores[0].cost
    assert placement.chosen.cost <= least + max(config.near_equal_ms, config.near_equal_fraction * least)


def _score(prompt_tokens: int, candidate: Candidate, config: PlacementConfig) -> Score:
    return score_all(prompt_tokens, [candidate], config)[0]


@pytest.mark.parametrize(
    ("changed", "sign", "term"),
    [
        ("queued_prefill_tokens", 1, lambda score: score.queue_ms),
        ("queued_pairs", 1, lambda score: score.queue_ms),
        ("sequences", 1, lambda score: score.decode_ms + score.interference_ms),
        ("context_tokens", 1, lambda score: score.decode_ms),
        ("used_blocks", 1, lambda score: score.memory_ms),
        ("cached_tokens", -1, lambda score: score.prefill_ms + score.host_load_ms),
        ("total_blocks", -1, lambda score: score.memory_ms),
    ],
)
@given(COUNTS, CANDIDATE, COUNTS, CONFIGS)
def test_more_load_never_costs_less_and_more_cache_never_more(
    changed: str,
    sign: int,
    term: Callable[[Score], float],
    prompt_tokens: int,
    candidate: Candidate,
    more: int,
    config: PlacementConfig,
) -> None:
    """But for pools of no known size, which have no price."""
    candidate = candidate._replace(total_blocks=max(candidate.total_blocks, 1))
    after = candidate._replace(**{changed: getattr(candidate, changed) + more})
    before_score, after_score = _score(prompt_tokens, candidate, config), _score(prompt_tokens, after, config)
    tolerance = 1 + 1e-9  # sums of floats of very different size
    if sign > 0:
        assert term(before_score) <= term(after_score)
        assert before_score.total_ms <= after_score.total_ms * tolerance
    else:
        assert term(after_score) <= term(before_score) * tolerance
        assert after_score.total_ms <= before_score.total_ms * tolerance


@given(CANDIDATE, COUNTS, st.integers(0, 2**20), CONFIGS)
def test_a_longer_prompt_never_costs_less(candidate, prompt_tokens, more, config):
    longer = _score(prompt_tokens + more, candidate, config).total_ms
    assert _score(prompt_tokens, candidate, config).total_ms <= longer * (1 + 1e-9)


@given(st.integers(1, 100_000), st.integers(0, 100_000), st.floats(1, 1e6), st.sampled_from([0.0, 0.5]))
def test_a_hot_prefix_replicates_once_recomputing_is_faster_than_waiting(
    prompt_tokens: int, queued_tokens: int, rate: float, later: float
) -> None:
    """Between equally fast workers: the holder wins while its queue is shorter than the price of what it saves."""
    config = PlacementConfig(near_equal_ms=0.0, near_equal_fraction=0.0, later_fraction=later)
    saved_tokens = (prompt_tokens - 1) // 16 * 16
    holder = Candidate(
        address="holder",
        worker_id=WorkerId("holder"),
        cached_tokens=saved_tokens,
        queued_prefill_tokens=queued_tokens,
        prefill_tokens_per_second=rate,
    )
    idle = Candidate(address="idle", worker_id=WorkerId("idle"), prefill_tokens_per_second=rate)
    winner = place(
        PlacementRequest(prompt_tokens=prompt_tokens), [holder, idle], "prefix", Random(0), config
    ).chosen.address
    if queued_tokens != (price := saved_tokens * (1 + later)):
        assert winner == ("holder" if queued_tokens < price else "idle")


@given(REQUESTS, CANDIDATES, st.integers(0, 2**32))
def test_two_choices_never_picks_the_worse_of_its_two(request_, candidates, seed):
    class Sampler(Random):
        def sample(self, population: Any, k: int) -> Any:
            self.drawn = super().sample(population, k)
            return self.drawn

    sampler = Sampler(seed)
    placement = place(request_, candidates, "two_choices", sampler)
    drawn = [placement.considered[number] for number in sampler.drawn]
    assert len(drawn) == min(2, len(candidates))
    assert placement.chosen.load_ms == min(score.load_ms for score in drawn)


@given(REQUESTS, CANDIDATES, st.floats(0, 10))
def test_dynamos_cost_is_its_formula(request_: PlacementRequest, candidates: list[Candidate], weight: float):
    config = PlacementConfig(dynamo_overlap_score_weight=weight)
    placement = place(request_, candidates, "dynamo", Random(0), config)
    by_address = {candidate.address: candidate for candidate in candidates}
    for score in placement.scores:
        worker = by_address[score.address]
        prefill_blocks = (worker.queued_prefill_tokens + score.uncached_tokens) / worker.block_size
        decode_blocks = worker.used_blocks + -(-score.needed_tokens // worker.block_size)
        assert score.cost == pytest.approx(weight * prefill_blocks + decode_blocks)
    assert placement.chosen.cost == placement.scores[0].cost


@given(CANDIDATES, st.integers(0, 2**32), st.integers(1, 5))
def test_round_robin_gives_every_worker_as_many_turns(candidates, first_turn, rounds):
    turns = range(first_turn, first_turn + rounds * len(candidates))
    taken = [
        place(
            PlacementRequest(prompt_tokens=1, num_placements=num_placements),
            candidates,
            "round_robin",
            Random(0),
        ).chosen.address
        for num_placements in turns
    ]
    assert {candidate.address: taken.count(candidate.address) for candidate in candidates} == {
        candidate.address: rounds for candidate in candidates
    }


KEYS = st.binary(min_size=1, max_size=16)
LOADS = st.lists(st.sampled_from([0, 0, 0, 5000]), min_size=1, max_size=8)


def fresh(key: bytes, workers: list[Candidate], seed: int = 0) -> WorkerId:
    request = PlacementRequest(prompt_tokens=1000, fresh_key=key)
    return place(request, workers, "prefix", Random(seed)).chosen.worker_id


def workers_with(loads: list[int]) -> list[Candidate]:
    return [
        Candidate(address=f"{number}", worker_id=WorkerId(f"w{number}"), queued_prefill_tokens=load)
        for number, load in enumerate(loads)
    ]


@given(KEYS, LOADS, st.randoms(use_true_random=False), st.integers())
def test_every_router_sends_a_new_prefix_to_the_same_of_equal_workers(key, loads, chance, seed):
    workers = workers_with(loads)
    shuffled = chance.sample(workers, len(workers))
    assert fresh(key, workers) == fresh(key, shuffled, seed)


@given(KEYS, LOADS)
def test_a_worker_that_leaves_moves_its_own_prefixes_alone(key: bytes, loads: list[int]) -> None:
    workers = workers_with([0, *loads])
    chosen = fresh(key, workers)
    for leaving in workers:
        remaining = [worker for worker in workers if worker is not leaving]
        if leaving.worker_id != chosen and remaining:
            assert fresh(key, remaining) == chosen


def test_new_prefixes_are_balanced_over_equal_workers() -> None:
    workers = workers_with([0] * 8)
    shares = Counter(fresh(number.to_bytes(8, "big"), workers) for number in range(4000))
    assert all(400 < share < 600 for share in shares.values()), shares


@given(KEYS)
def test_prompts_with_one_key_never_pile_up_beside_an_idle_worker(key: bytes) -> None:
    workers = workers_with([0] * 4)
    for number in range(4):
        chosen = fresh(key, workers)
        index = next(at for at, worker in enumerate(workers) if worker.worker_id == chosen)
        assert workers[index].queued_prefill_tokens == 0, number
        workers[index] = workers[index]._replace(queued_prefill_tokens=1000)
