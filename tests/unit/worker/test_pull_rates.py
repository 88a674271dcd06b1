"""Averages of pulls stay between the measurements, whatever their order, and are never infinite or NaN."""

import math

import pytest
from blockyard.worker.scheduling.pulls import LEAST_SECONDS, PullRates
from hypothesis import given
from hypothesis import strategies as st

SECONDS = st.floats(0, 1e4)
ANSWERED = st.tuples(SECONDS, st.integers(0, 1 << 45), SECONDS)


def rates_after(*pulls: tuple[float, int, float] | float) -> PullRates:
    rates = PullRates()
    for pull in pulls:
        if isinstance(pull, float):
            rates.unanswered(pull)
        else:
            rates.answered(*pull)
    return rates


@given(st.lists(ANSWERED | SECONDS, max_size=30))
def test_averages_lie_between_the_least_and_the_largest_measurement(
    pulls: list[tuple[float, int, float] | float],
) -> None:
    rates = rates_after(*pulls)
    answered = [pull for pull in pulls if isinstance(pull, tuple)]
    if not answered:
        assert (rates.setup_seconds, rates.bytes_per_second) == (0, 0), "unknown"
        return
    setups = [max(pull[0], LEAST_SECONDS) for pull in answered]
    speeds = [pull[1] / max(pull[2], LEAST_SECONDS) for pull in answered]
    largest_setup = max(*setups, *(pull for pull in pulls if isinstance(pull, float)), 0)
    assert min(setups) * (1 - 1e-9) <= rates.setup_seconds <= largest_setup * (1 + 1e-9)
    assert min(speeds) * (1 - 1e-9) <= rates.bytes_per_second <= max(speeds) * (1 + 1e-9)
    assert math.isfinite(rates.setup_seconds + rates.bytes_per_second)


@given(st.lists(ANSWERED, min_size=1, max_size=10), SECONDS)
def test_a_pull_without_an_answer_never_makes_the_set_up_shorter(
    pulls: list[tuple[float, int, float]], seconds: float
) -> None:
    before, after = rates_after(*pulls), rates_after(*pulls, seconds)
    assert after.setup_seconds >= before.setup_seconds
    assert after.bytes_per_second == before.bytes_per_second


def test_a_link_that_became_slow_is_soon_known_as_slow() -> None:
    fast, slow = (0.001, 100_000_000, 0.1), (0.001, 5_000_000, 0.5)
    assert rates_after(fast, fast).bytes_per_second == pytest.approx(1e9)
    assert rates_after(fast, fast, fast, slow).bytes_per_second < 3.5e8
    assert rates_after(fast, *[slow] * 10).bytes_per_second == pytest.approx(1e7, rel=0.5)


def test_a_pull_that_brought_nothing_in_its_time_lowers_the_rate() -> None:
    fast, late = (0.001, 100_000_000, 0.1), (0.001, 0, 1.0)
    assert rates_after(fast, late).bytes_per_second < 1e8
    assert rates_after(late).bytes_per_second == 0, "unknown"


def test_a_pull_of_one_block_says_little_beside_large_ones() -> None:
    large, tiny = (0.001, 100_000_000, 0.1), (0.001, 20_000, 1e-5)
    assert rates_after(large, tiny, tiny).bytes_per_second == pytest.approx(1e9, rel=0.01)
