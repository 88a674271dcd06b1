"""The retry delay of a refusal follows the measured rate at which requests end, within bounds."""

import pytest
from blockyard.router.admission.retry_delay import (
    MAX_DELAY_SECONDS,
    MIN_DELAY_SECONDS,
    CompletionRate,
    retry_delay_seconds,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from .prompt import Clock


def busy(rate: CompletionRate, clock: Clock, *, held: int, each_seconds: float, seconds: float) -> None:
    """Hold `held` requests for `seconds`, and replace each at its end."""
    rate.begin(held)
    for _ in range(int(seconds * held / each_seconds)):
        clock.now += each_seconds / held
        rate.end(1)
        rate.begin(1)


def test_under_full_load_it_is_the_observed_rate() -> None:
    clock = Clock()
    rate = CompletionRate(clock)
    busy(rate, clock, held=10, each_seconds=2.0, seconds=60)
    assert rate.seconds_to_free(1) == pytest.approx(0.2, rel=0.05)
    assert rate.seconds_to_free(10) == pytest.approx(2.0, rel=0.05)
    assert rate.seconds_to_free(1, held=5) == pytest.approx(0.4, rel=0.05)


def test_what_was_seen_of_a_few_says_how_fast_many_will_go() -> None:
    clock = Clock()
    rate = CompletionRate(clock)
    busy(rate, clock, held=1, each_seconds=2.0, seconds=60)
    rate.begin(99)
    assert rate.seconds_to_free(1) == pytest.approx(2.0 / 100, rel=0.1)


def test_idle_time_says_nothing() -> None:
    clock = Clock()
    rate = CompletionRate(clock)
    busy(rate, clock, held=10, each_seconds=2.0, seconds=60)
    rate.end(10)
    before = rate.seconds_to_free(1, held=10)
    clock.now += 3600
    rate.begin(10)
    assert rate.seconds_to_free(1) == before


def test_a_standstill_is_noticed_while_it_lasts() -> None:
    clock = Clock()
    rate = CompletionRate(clock)
    busy(rate, clock, held=10, each_seconds=2.0, seconds=60)
    clock.now += 20
    assert rate.seconds_to_free(1) > 1.0
    clock.now += 10_000
    assert rate.seconds_to_free(1) > MAX_DELAY_SECONDS


def test_a_corrected_amount_is_no_completion() -> None:
    clock = Clock()
    rate, corrected = CompletionRate(clock), CompletionRate(clock)
    for each in (rate, corrected):
        each.begin(100)
    corrected.change(-50)
    corrected.change(50)
    clock.now += 1
    assert (corrected.held, corrected.seconds_to_free(1)) == (100, rate.seconds_to_free(1))


@settings(deadline=None)
@given(st.floats(0, 1e9), st.floats(0, 1))
def test_the_delay_is_within_bounds_and_never_before_what_is_expected(expected_seconds: float, chance: float):
    delay = retry_delay_seconds(expected_seconds, chance)
    assert MIN_DELAY_SECONDS <= delay <= MAX_DELAY_SECONDS
    assert delay >= min(expected_seconds, MAX_DELAY_SECONDS / 1.25)


def test_chance_spreads_those_who_are_refused_together() -> None:
    assert retry_delay_seconds(100.0, 1.0) - retry_delay_seconds(100.0, 0.0) > 5.0
    assert retry_delay_seconds(0.0, 1.0) > retry_delay_seconds(0.0, 0.0)
