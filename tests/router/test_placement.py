"""Placement is arithmetic over a snapshot; these are its properties."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from blockyard.proto.prefix_index import WorkerId
from blockyard.router.placement import Candidate, PlacementConfig, PlacementRequest, place
from hypothesis import given
from hypothesis import strategies as st


def candidate(name: str, **beliefs: float) -> Candidate:
    return Candidate(
        address=f"{name}:1",
        worker_id=WorkerId(name),
        total_blocks=1000,
        **{"prefill_tokens_per_second": 1000.0, **beliefs},
    )


def chosen(request: PlacementRequest, *candidates: Candidate, policy: str = "prefix", seed: int = 0) -> str:
    return place(request, candidates, policy, Random(seed)).chosen.worker_id


def test_the_longest_cached_prefix_wins_among_equally_loaded_workers() -> None:
    request = PlacementRequest(prompt_tokens=1000)
    for seed in range(20):
        assert chosen(request, candidate("a"), candidate("b", cached_tokens=512), seed=seed) == "b"


@pytest.mark.parametrize(("queued_tokens", "winner"), [(100, "holder"), (2000, "idle")])
def test_the_holder_loses_once_recomputing_is_faster_than_waiting(queued_tokens: int, winner: str) -> None:
    holder = candidate("holder", cached_tokens=960, queued_prefill_tokens=queued_tokens)
    assert chosen(PlacementRequest(prompt_tokens=1000), holder, candidate("idle")) == winner


def test_terms_are_milliseconds_and_add_up() -> None:
    worker = candidate("a", cached_tokens=200, queued_prefill_tokens=300, sequences=5)
    weights = PlacementConfig(decode_ms_per_sequence=4.0)
    score = place(PlacementRequest(prompt_tokens=1000), [worker], "prefix", Random(0), weights).chosen
    assert (score.queue_ms, score.prefill_ms, score.decode_ms, score.memory_ms) == (300.0, 800.0, 20.0, 0.0)
    assert score.total_ms == 1120.0


def test_a_pool_without_room_costs_more_than_a_roomy_one() -> None:
    full = candidate("full", used_blocks=990)
    assert chosen(PlacementRequest(prompt_tokens=1000), full, candidate("roomy", sequences=20)) == "roomy"
    score = place(PlacementRequest(prompt_tokens=1000), [full], "prefix", Random(0)).chosen
    assert score.memory_ms == PlacementConfig().memory_full_ms


def test_near_equals_share_and_clear_losers_get_nothing() -> None:
    workers = [candidate("a"), candidate("b", sequences=1), candidate("c", queued_prefill_tokens=500)]
    request = PlacementRequest(prompt_tokens=1000)
    rng = Random(7)
    shares = Counter(place(request, workers, "prefix", rng).chosen.worker_id for _ in range(1000))
    assert shares["c"] == 0
    assert 400 < shares["a"] < 600, shares


def test_an_unmeasured_worker_is_taken_to_be_typical_rather_than_free() -> None:
    slow = [candidate(name, prefill_tokens_per_second=100.0) for name in "ab"]
    fresh = candidate("c", prefill_tokens_per_second=0.0)
    scores = place(PlacementRequest(prompt_tokens=100), [*slow, fresh], "prefix", Random(0)).scores
    assert {score.prefill_ms for score in scores} == {1000.0}


def test_round_robin_takes_turns_whatever_is_cached() -> None:
    workers = [candidate("b", cached_tokens=96), candidate("a"), candidate("c")]
    turns = [
        chosen(PlacementRequest(prompt_tokens=100, turn=turn), *workers, policy="round_robin")
        for turn in range(6)
    ]
    assert turns == ["a", "b", "c", "a", "b", "c"]


def test_least_loaded_ignores_the_cache() -> None:
    holder = candidate("holder", cached_tokens=960, sequences=3)
    assert (
        chosen(PlacementRequest(prompt_tokens=1000), holder, candidate("idle"), policy="least_loaded")
        == "idle"
    )


def test_without_the_index_a_prefix_sticks_to_two_workers_until_both_are_loaded() -> None:
    names = "abcdefgh"
    keys = [bytes([number]) * 16 for number in range(64)]

    def winners(loaded: set[str]) -> dict[bytes, str]:
        workers = [candidate(name, queued_prefill_tokens=400 if name in loaded else 0) for name in names]
        return {
            key: chosen(PlacementRequest(prompt_tokens=1000, prefix_key=key, index_available=False), *workers)
            for key in keys
        }

    first = winners(set())
    assert set(first.values()) == set(names), "64 prefixes should use all of 8 workers"
    assert winners(set()) == first
    for key, winner in first.items():
        second = winners({winner})[key]
        assert second != winner
        assert winners({winner, second})[key] not in (winner, second)


def test_losing_one_worker_moves_only_its_prefixes() -> None:
    keys = [bytes([number]) * 16 for number in range(64)]

    def winners(names: str) -> dict[bytes, str]:
        workers = [candidate(name) for name in names]
        return {
            key: chosen(PlacementRequest(prompt_tokens=100, prefix_key=key, index_available=False), *workers)
            for key in keys
        }

    before, after = winners("abcd"), winners("abc")
    assert all(after[key] == winner for key, winner in before.items() if winner != "d")


def test_every_candidate_is_shown_cheapest_first() -> None:
    workers = [candidate("a", sequences=50), candidate("b"), candidate("c", queued_prefill_tokens=900)]
    scores = place(PlacementRequest(prompt_tokens=100), workers, "prefix", Random(0)).scores
    assert [score.worker_id for score in scores] == ["b", "a", "c"]


def test_a_measured_decode_rate_prices_sequences_and_the_constant_stands_in_without() -> None:
    fast = candidate("fast", sequences=10, decode_tokens_per_second=5000.0)
    slow = candidate("slow", sequences=10, decode_tokens_per_second=50.0)
    unmeasured = candidate("unmeasured", sequences=10)
    scores = place(
        PlacementRequest(prompt_tokens=1), [fast, slow, unmeasured], "prefix", Random(0), PlacementConfig()
    ).scores
    assert {score.worker_id: score.decode_ms for score in scores} == {
        "fast": pytest.approx(1.0),
        "slow": pytest.approx(100.0),
        "unmeasured": pytest.approx(40.0),
    }


def test_host_memory_beats_computing_again_when_loading_is_faster() -> None:
    request = PlacementRequest(prompt_tokens=1000)
    for rate, winner in ((5000.0, "host"), (500.0, "none")):
        host = candidate("host", host_cached_tokens=960, host_tokens_per_second=rate)
        assert {chosen(request, host, candidate("none"), seed=seed) for seed in range(20)} == {winner}


def test_a_hit_on_the_gpu_beats_one_in_host_memory_of_a_worker_as_idle() -> None:
    host = candidate("host", host_cached_tokens=960, host_tokens_per_second=5000.0)
    gpu = candidate("gpu", cached_tokens=960)
    request = PlacementRequest(prompt_tokens=1000)
    assert {chosen(request, host, gpu, seed=seed) for seed in range(20)} == {"gpu"}
    busy = candidate("gpu", cached_tokens=960, queued_prefill_tokens=400)
    assert chosen(request, host, busy) == "host", "waiting is dearer than loading"


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_host_memory_of_unknown_speed_is_worth_nothing(rate: float) -> None:
    host = candidate("host", cached_tokens=32, host_cached_tokens=960, host_tokens_per_second=rate)
    plain = candidate("plain", cached_tokens=32)
    scores = place(PlacementRequest(prompt_tokens=1000), [host, plain], "prefix", Random(0)).scores
    assert [(s.host_cached_tokens, s.uncached_tokens, s.host_load_ms, s.total_ms) for s in scores] == [
        (0, 968, 0.0, 968.0)
    ] * 2


def test_what_comes_from_host_memory_is_no_prefill_but_needs_room_in_the_pool() -> None:
    host = candidate(
        "host", cached_tokens=160, host_cached_tokens=640, host_tokens_per_second=8000.0, used_blocks=860
    )
    score = place(PlacementRequest(prompt_tokens=1000), [host], "prefix", Random(0)).chosen
    assert (score.cached_tokens, score.host_cached_tokens, score.uncached_tokens) == (160, 640, 200)
    assert (score.prefill_ms, score.host_load_ms, score.needed_tokens) == (200.0, 80.0, 840)
    without = place(
        PlacementRequest(prompt_tokens=1000),
        [candidate("a", used_blocks=860, cached_tokens=160)],
        "prefix",
        Random(0),
    ).chosen
    assert score.memory_ms == without.memory_ms > 0
    assert score.total_ms == 280.0 + score.memory_ms


RATES = st.one_of(st.just(0.0), st.floats(allow_nan=False, allow_infinity=False))
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        address=st.uuids().map(str),
        worker_id=st.sampled_from("abc").map(WorkerId),
        cached_tokens=st.integers(0, 2**32),
        host_cached_tokens=st.integers(0, 2**32),
        queued_prefill_tokens=st.integers(0, 2**64),
        sequences=st.integers(0, 2**32),
        used_blocks=st.integers(0, 2**32),
        total_blocks=st.integers(0, 2**32),
        block_size=st.integers(1, 2**32),
        prefill_tokens_per_second=RATES,
        decode_tokens_per_second=RATES,
        host_tokens_per_second=RATES,
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda candidate: candidate.address,
)


@given(CANDIDATES, st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_a_winner_is_near_the_least_cost_and_the_order_of_candidates_is_nothing(
    candidates: list[Candidate], prompt_tokens: int, shuffler: Random
) -> None:
    request = PlacementRequest(prompt_tokens=prompt_tokens)
    weights = PlacementConfig()

    def winners(given_order: list[Candidate]) -> set[str]:
        chooser = Chooser()
        placement = place(request, given_order, "prefix", chooser, weights)
        least = placement.scores[0].total_ms
        assert least == min(score.total_ms for score in placement.scores)
        limit = least + max(weights.near_equal_ms, weights.near_equal_fraction * least)
        eligible = {score.address for score in placement.scores if score.total_ms <= limit}
        assert placement.chosen.address in eligible
        assert chooser.offered == eligible
        return eligible

    shuffled = list(candidates)
    shuffler.shuffle(shuffled)
    assert winners(candidates) == winners(shuffled)


class Chooser(Random):
    """Remembers among whom it was asked to choose."""

    offered: set[str]

    def choice(self, scores: Any) -> Any:
        self.offered = {score.address for score in scores}
        return super().choice(scores)


def test_placing_on_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        place(PlacementRequest(prompt_tokens=1), [], "prefix", Random(0))
