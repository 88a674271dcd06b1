"""Durations of steps that only decode, by the number of decodes."""

from itertools import pairwise

import pytest
from blockyard.worker.scheduling.decode_times import MEASURED_FOR_STEPS, DecodeTimes
from hypothesis import given
from hypothesis import strategies as st

COUNTS = st.integers(1, 4096)
SECONDS = st.floats(1e-4, 10.0)


def times_of(*measured: tuple[int, float], smoothing: float = 0.2) -> DecodeTimes:
    times = DecodeTimes(smoothing=smoothing)
    for count, seconds in measured:
        times.observe(count, seconds)
    return times


def test_sixteen_decodes_are_not_sixteen_times_one() -> None:
    assert times_of().expected(16) == 0.0, "no step was seen"
    times = times_of((1, 0.02))
    assert times.expected(16) == pytest.approx(0.08), "between 0.02, the same weights, and 0.32"
    times.observe(17, 0.04)
    assert [times.expected(count) for count in (1, 9, 17)] == pytest.approx([0.02, 0.03, 0.04])


def test_the_newest_step_counts_by_its_weight() -> None:
    assert times_of((4, 0.1), (4, 0.2), smoothing=0.25).expected(4) == pytest.approx(0.125)


@given(SECONDS, SECONDS, st.integers(1, 200), COUNTS)
def test_times_that_grow_with_the_number_are_told_as_they_are(
    fixed: float, each: float, step: int, decodes: int
) -> None:
    """Times between the measurements are exact; beyond them more decodes take no less time than fewer."""
    counts = range(1, 2000, step)
    times = times_of(*((count, fixed + each * count) for count in counts))
    if decodes <= counts[-1] / 2:
        assert times.expected(decodes) == pytest.approx(fixed + each * decodes, rel=1e-6)
    assert times.expected(decodes) <= times.expected(decodes + 1)


@given(st.lists(SECONDS, min_size=1, max_size=12), st.lists(COUNTS, min_size=2))
def test_of_more_decodes_no_less_is_expected(seconds: list[float], counts: list[int]) -> None:
    """Expected times grow with the number of decodes where the measured times do."""
    times = times_of(*((2**size, measured) for size, measured in enumerate(sorted(seconds))))
    expected = [times.expected(count) for count in sorted(counts)]
    assert all(fewer <= more * (1 + 1e-12) for fewer, more in pairwise(expected))


def test_decodes_are_to_be_measured_at_first_and_after_many_steps_with_prompts() -> None:
    times = times_of((1, 0.02))
    assert times.wants_measuring(16)
    times.observe(20, 0.04)
    wanted = [times.wants_measuring(16) for _ in range(MEASURED_FOR_STEPS + 2)]
    assert wanted == [*[False] * MEASURED_FOR_STEPS, True, True]
    times.observe(16, 0.04)
    assert not times.wants_measuring(31)
