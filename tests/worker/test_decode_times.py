"""What a step of decodes alone takes, by how many they are."""

import math

import pytest
from blockyard.worker.decode_times import DecodeTimes
from hypothesis import given
from hypothesis import strategies as st

COUNTS = st.integers(1, 4096)


def test_nothing_is_expected_before_a_step_was_seen() -> None:
    assert DecodeTimes(smoothing=0.2).expected(16) == 0.0


def test_sixteen_decodes_are_not_sixteen_times_one() -> None:
    times = DecodeTimes(smoothing=0.2)
    times.observe(1, 0.02)
    assert times.expected(16) == pytest.approx(0.08), "between 0.02, the same weights, and 0.32"
    times.observe(16, 0.035)
    assert (times.expected(1), times.expected(16)) == (0.02, 0.035)


def test_the_newest_step_counts_by_its_weight() -> None:
    times = DecodeTimes(smoothing=0.25)
    times.observe(4, 0.1)
    times.observe(5, 0.2)
    assert times.expected(4) == pytest.approx(0.125)


@given(st.lists(st.tuples(COUNTS, st.floats(1e-4, 10.0)), min_size=1), COUNTS)
def test_what_is_expected_lies_within_what_it_may_be(steps: list[tuple[int, float]], decodes: int) -> None:
    times = DecodeTimes(smoothing=0.2)
    for count, seconds in steps:
        times.observe(count, seconds)
    expected = times.expected(decodes)
    least = min(seconds * min(1.0, decodes / count / 2) for count, seconds in steps)
    most = max(seconds * max(1.0, 2 * decodes / count) for count, seconds in steps)
    assert math.nextafter(least, 0.0) * 0.999 <= expected <= most * 1.001


@given(COUNTS, st.floats(1e-4, 10.0), COUNTS, COUNTS)
def test_of_more_decodes_no_less_is_expected(seen: int, seconds: float, one: int, other: int) -> None:
    times = DecodeTimes(smoothing=0.2)
    times.observe(seen, seconds)
    assert times.expected(min(one, other)) <= times.expected(max(one, other))
