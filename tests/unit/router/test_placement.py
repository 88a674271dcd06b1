"""Placement is arithmetic on a snapshot; these tests check its properties."""

from collections import Counter
from random import Random

import pytest
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.policies import PlacementRequest, place

from .candidates import candidate, chosen


def test_terms_are_milliseconds_and_add_up() -> None:
    worker = candidate("a", cached_tokens=200, queued_prefill_tokens=300, sequences=5)
    weights = PlacementConfig(decode_ms_per_sequence=4.0, others_fraction=0.5, later_fraction=0.25)
    score = place(PlacementRequest(prompt_tokens=1000), [worker], "prefix", Random(0), weights).chosen
    assert (score.queue_ms, score.prefill_ms, score.decode_ms, score.memory_ms) == (300.0, 800.0, 20.0, 0.0)
    assert score.interference_ms == (0.25 + 0.5 * 5) * 800.0
    assert score.total_ms == 300.0 + 800.0 + 20.0 + 2200.0


def test_context_read_costs_a_part_of_what_computing_it_would() -> None:
    config = PlacementConfig(context_fraction=0.25)
    score = place(
        PlacementRequest(prompt_tokens=100), [candidate("a", context_tokens=800)], "prefix", Random(0), config
    ).chosen
    assert score.decode_ms == 0.25 * 800


def test_a_pool_without_room_costs_more_than_a_roomy_one() -> None:
    full = candidate("full", used_blocks=990)
    assert chosen(PlacementRequest(prompt_tokens=1000), full, candidate("roomy", sequences=10)) == "roomy"
    score = place(PlacementRequest(prompt_tokens=1000), [full], "prefix", Random(0)).chosen
    assert score.memory_ms == PlacementConfig().memory_full_ms


def test_before_any_measurement_the_assumed_rate_stands_in() -> None:
    fresh = [candidate(name, prefill_tokens_per_second=0.0) for name in "ab"]
    config = PlacementConfig(assumed_prefill_tokens_per_second=100.0)
    scores = place(PlacementRequest(prompt_tokens=100), fresh, "prefix", Random(0), config).scores
    assert {score.prefill_ms for score in scores} == {1000.0}


def test_attention_to_a_long_context_is_priced_in_queue_and_prompt() -> None:
    """A pair takes a thousandth of a prompt token's time: a suffix of 100 behind 900 tokens has 95,000 pairs."""
    worker = candidate(
        "a", cached_tokens=900, queued_prefill_tokens=200, queued_pairs=40_000, pair_tokens=0.001
    )
    (score,) = place(PlacementRequest(prompt_tokens=1000), [worker], "prefix", Random(0)).scores
    assert (score.queue_ms, score.prefill_ms) == pytest.approx((200 + 40, 100 + 95))


def test_half_a_measured_decode_step_is_priced_and_the_constant_stands_in_without() -> None:
    fast = candidate("fast", sequences=10, decode_step_ms=2.0)
    slow = candidate("slow", sequences=10, decode_step_ms=200.0)
    unmeasured = candidate("unmeasured", sequences=10)
    scores = place(
        PlacementRequest(prompt_tokens=1), [fast, slow, unmeasured], "prefix", Random(0), PlacementConfig()
    ).scores
    assert {score.worker_id: score.decode_ms for score in scores} == {
        "fast": pytest.approx(1.0),
        "slow": pytest.approx(100.0),
        "unmeasured": pytest.approx(40.0),
    }


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_host_memory_of_unknown_speed_is_worth_nothing(rate: float) -> None:
    host = candidate("host", cached_tokens=32, host_cached_tokens=960, host_tokens_per_second=rate)
    plain = candidate("plain", cached_tokens=32)
    config = PlacementConfig(later_fraction=0.0)
    scores = place(PlacementRequest(prompt_tokens=1000), [host, plain], "prefix", Random(0), config).scores
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
    assert score.total_ms == 280.0 + score.memory_ms + score.decode_ms + score.interference_ms


def test_placing_on_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        place(PlacementRequest(prompt_tokens=1), [], "prefix", Random(0))


def test_near_equals_share_and_clear_losers_get_nothing() -> None:
    workers = [candidate("a"), candidate("b", sequences=1), candidate("c", queued_prefill_tokens=500)]
    request = PlacementRequest(prompt_tokens=1000)
    rng, config = Random(7), PlacementConfig(others_fraction=0.0)
    shares = Counter(place(request, workers, "prefix", rng, config).chosen.worker_id for _ in range(1000))
    assert shares["c"] == 0
    assert 400 < shares["a"] < 600, shares
