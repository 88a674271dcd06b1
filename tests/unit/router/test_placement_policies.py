"""Guarantees of each policy beside `prefix`, and the effects of a session and of a lost index."""

from collections import Counter
from random import Random

import pytest
from blockyard.proto.index.contract import WorkerId
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.policies import PlacementRequest, place

from .candidates import candidate, chosen

KEYS = [bytes([number]) * 16 for number in range(64)]


def test_least_loaded_ignores_the_cache() -> None:
    holder = candidate("holder", cached_tokens=960, sequences=3)
    assert (
        chosen(PlacementRequest(prompt_tokens=1000), holder, candidate("idle"), policy="least_loaded")
        == "idle"
    )


def test_without_the_index_a_prefix_sticks_to_two_workers_until_both_are_loaded() -> None:
    names = "abcdefgh"

    def winners(loaded: set[str]) -> dict[bytes, str]:
        workers = [candidate(name, queued_prefill_tokens=400 if name in loaded else 0) for name in names]
        return {
            key: chosen(PlacementRequest(prompt_tokens=1000, prefix_key=key, index_available=False), *workers)
            for key in KEYS
        }

    first = winners(set())
    assert set(first.values()) == set(names), "64 prefixes should use all of 8 workers"
    assert winners(set()) == first
    for key, winner in first.items():
        second = winners({winner})[key]
        assert second != winner
        assert winners({winner, second})[key] not in (winner, second)


def test_losing_one_worker_moves_only_its_prefixes() -> None:

    def winners(names: str) -> dict[bytes, str]:
        workers = [candidate(name) for name in names]
        return {
            key: chosen(PlacementRequest(prompt_tokens=100, prefix_key=key, index_available=False), *workers)
            for key in KEYS
        }

    before, after = winners("abcd"), winners("abc")
    assert all(after[key] == winner for key, winner in before.items() if winner != "d")


def test_round_robin_costs_are_the_turns_until_a_worker_is_next() -> None:
    workers = [candidate("b"), candidate("c"), candidate("a")]
    scores = place(
        PlacementRequest(prompt_tokens=1, num_placements=7), workers, "round_robin", Random(0)
    ).scores
    assert [(score.worker_id, score.cost) for score in scores] == [("b", 0.0), ("c", 1.0), ("a", 2.0)]


def test_two_choices_looks_at_two_workers_and_takes_the_less_loaded() -> None:
    workers = [candidate(name, queued_prefill_tokens=100 * rank) for rank, name in enumerate("abcd")]
    rng = Random(3)
    wins = Counter(
        place(PlacementRequest(prompt_tokens=10), workers, "two_choices", rng).chosen.worker_id
        for _ in range(6000)
    )
    # Of six pairs the best worker is in three and wins them all, the worst in three and wins none.
    assert wins["d"] == 0
    assert [round(wins[name] / 1000) for name in "abc"] == [3, 2, 1], wins


def test_a_session_stays_on_one_worker_until_that_is_loaded() -> None:
    names = "abcdefgh"

    def winners(loaded: set[str]) -> dict[bytes, str]:
        workers = [candidate(name, queued_prefill_tokens=400 if name in loaded else 0) for name in names]
        return {
            key: chosen(PlacementRequest(prompt_tokens=9, session_key=key), *workers, policy="session")
            for key in KEYS
        }

    first = winners(set())
    assert set(first.values()) == set(names), "64 sessions should use all of 8 workers"
    loaded = first[KEYS[0]]
    for key, winner in winners({loaded}).items():
        assert (winner == first[key]) is (first[key] != loaded)


@pytest.mark.parametrize("key", [b"", b"chat"])
def test_without_a_session_or_an_unloaded_worker_the_session_policy_goes_by_load(key: bytes) -> None:
    workers = [candidate("a", queued_prefill_tokens=900), candidate("b", queued_prefill_tokens=600)]
    request = PlacementRequest(prompt_tokens=9, session_key=key)
    assert {chosen(request, *workers, policy="session", seed=seed) for seed in range(9)} == {"b"}


def test_among_near_equals_the_worker_that_served_the_session_last_wins() -> None:
    workers = [candidate("a"), candidate("b", queued_prefill_tokens=1), candidate("c")]
    request = PlacementRequest(prompt_tokens=1000, session_worker=WorkerId("b"))
    assert {chosen(request, *workers, seed=seed) for seed in range(20)} == {"b"}


def test_a_session_is_a_hint_and_never_worth_more_than_a_tie() -> None:
    busy = candidate("busy", queued_prefill_tokens=300)
    request = PlacementRequest(prompt_tokens=1000, session_worker=WorkerId("busy"))
    assert {chosen(request, busy, candidate("a"), seed=seed) for seed in range(20)} == {"a"}
    gone = PlacementRequest(prompt_tokens=1000, session_worker=WorkerId("gone"))
    assert {chosen(gone, candidate("a"), candidate("b"), seed=seed) for seed in range(20)} == {"a", "b"}


def test_without_the_index_a_session_is_hashed_rather_than_the_prefix() -> None:
    workers = [candidate(name) for name in "abcdefgh"]

    def winner(prefix_key: bytes, session_key: bytes) -> str:
        request = PlacementRequest(
            prompt_tokens=9, prefix_key=prefix_key, session_key=session_key, index_available=False
        )
        return chosen(request, *workers)

    assert len({winner(prefix_key, b"chat") for prefix_key in KEYS}) == 1
    assert {winner(b"", key) for key in KEYS} == {winner(key, b"") for key in KEYS} == set("abcdefgh")


def test_dynamos_temperature_draws_by_softmax_over_rescaled_costs() -> None:
    """Costs 0, 5 and 10 become 0, 0.5 and 1; at temperature 0.5 they are drawn as exp(0), exp(-1) and exp(-2)."""
    workers = [candidate(name, used_blocks=blocks) for name, blocks in (("a", 0), ("b", 5), ("c", 10))]
    config = PlacementConfig(dynamo_temperature=0.5)
    rng = Random(5)
    request = PlacementRequest(prompt_tokens=0)
    wins = Counter(place(request, workers, "dynamo", rng, config).chosen.worker_id for _ in range(20_000))
    # One standard deviation of a share is at most 0.0035.
    for name, share in (("a", 0.665), ("b", 0.245), ("c", 0.090)):
        assert wins[name] / 20_000 == pytest.approx(share, abs=0.02)


def test_dynamos_documented_example_comes_out_as_documented() -> None:
    """Router Design, "Worker Selection": prefill blocks 8, 5, 2 and decode blocks 10, 5, 9 cost 18, 10, 11."""
    workers = [
        candidate(name, cached_tokens=cached, used_blocks=decode - (160 - cached) // 16)
        for name, cached, decode in (("1", 32, 10), ("2", 80, 5), ("3", 128, 9))
    ]
    scores = place(PlacementRequest(prompt_tokens=160), workers, "dynamo", Random(0)).scores
    assert [(score.worker_id, score.cost) for score in scores] == [("2", 10.0), ("3", 11.0), ("1", 18.0)]
