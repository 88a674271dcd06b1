"""Drafts: which tokens are guessed, and how many of them a step verifies."""

from array import array

import pytest
from blockyard.worker.speculation.acceptance import Acceptance, Tried
from blockyard.worker.speculation.choice import least_gain, most_useful, shares
from blockyard.worker.speculation.row_times import RowTimes
from blockyard.worker.speculation.suffix_index import ORDERS, SuffixIndex
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples


def test_a_draft_is_what_followed_the_last_tokens_before() -> None:
    tokens = array("i", [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5])
    draft, length = SuffixIndex(20).draft(tokens, 3)
    assert (draft, length) == ([6, 7, 8], 3)


def test_a_longer_match_goes_before_a_newer_one() -> None:
    run = [10, 11, 12, 13, 14, 15]
    tokens = array("i", [*run, 77, 1, 14, 15, 88, 2, *run])
    draft, length = SuffixIndex(20).draft(tokens, 1)
    assert (draft, length) == ([77], 6)


def test_a_draft_that_reaches_the_end_goes_on_as_it_began() -> None:
    tokens = array("i", [9, 1, 2, 3, 1, 2, 3])
    assert SuffixIndex(9).draft(tokens, 7)[0] == [1, 2, 3, 1, 2, 3, 1]


@examples(60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=300),
    most=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 299), max_size=6),
)
def test_a_draft_follows_an_occurrence_and_does_not_depend_on_when_it_was_asked_for(
    tokens: list[int], most: int, cuts: list[int]
) -> None:
    asked_often = SuffixIndex(300)
    for cut in sorted(cuts):
        asked_often.draft(array("i", tokens[:cut]), most)
    draft, length = asked_often.draft(array("i", tokens), most)
    assert (draft, length) == SuffixIndex(300).draft(array("i", tokens), most)
    suffix = tokens[-ORDERS[-1] :]
    occurs = any(tokens[at : at + len(suffix)] == suffix for at in range(len(tokens) - len(suffix)))
    assert not draft or len(draft) == most
    if draft:
        assert occurs
        matched = tokens[len(tokens) - length :]
        followed = [
            [*tokens, *draft][end : end + most]
            for end in range(length, len(tokens))
            if tokens[end - length : end] == matched
        ]
        assert draft in followed


@settings(max_examples=5, deadline=None)
@given(tokens=st.lists(st.integers(0, 2**31 - 1), min_size=80, max_size=200))
def test_many_tokens_at_once_are_indexed_as_one_by_one(tokens: list[int]) -> None:
    at_once, one_by_one = SuffixIndex(100), SuffixIndex(100)
    at_once.draft(array("i", tokens), 1)
    for end in range(1, len(tokens) + 1):
        one_by_one.draft(array("i", tokens[:end]), 1)
    assert [list(table) for table in at_once._tables] == [list(table) for table in one_by_one._tables]


@settings(deadline=None)
@given(
    odds=st.lists(st.floats(0, 1), max_size=40),
    num_rows=st.integers(1, 64),
    a_row=st.floats(0, 1),
)
def test_drafts_are_chosen_only_where_they_are_expected_to_gain(
    odds: list[float], num_rows: int, a_row: float
) -> None:
    odds = sorted(odds, reverse=True)

    def seconds(rows: int) -> float:
        return 1.0 + a_row * rows

    total = most_useful(odds, num_rows, seconds)
    alone = num_rows / seconds(num_rows)
    if total:
        assert (num_rows + sum(odds[:total])) / seconds(num_rows + total) > least_gain(
            num_rows
        ) * alone * 0.999999
    elif odds:
        assert (num_rows + odds[0]) / seconds(num_rows + 1) <= least_gain(num_rows) * alone * 1.000001


def test_under_load_where_each_row_costs_what_it_gives_nothing_is_drafted() -> None:
    assert most_useful([1.0] * 64, 64, lambda rows: float(rows)) == 0


@settings(deadline=None)
@given(odds_of=st.lists(st.lists(st.floats(0, 1), max_size=6), max_size=6), total=st.integers(0, 20))
def test_drafts_are_divided_by_their_odds(odds_of: list[list[float]], total: int) -> None:
    odds_of = [sorted(own, reverse=True) for own in odds_of]
    counts = shares(odds_of, total)
    assert sum(counts) == min(total, sum(map(len, odds_of)))
    taken = [odds for own, count in zip(odds_of, counts, strict=True) for odds in own[:count]]
    left = [odds for own, count in zip(odds_of, counts, strict=True) for odds in own[count:]]
    assert not taken or not left or min(taken) >= max(left)


def test_times_between_measured_sizes_are_interpolated_and_the_first_step_of_a_size_does_not_count() -> None:
    times = RowTimes()
    for seconds in (9.0, 1.0):
        assert times.expected(3) == 0.0
        times.observe(2, seconds)
    times.observe(6, 30.0)
    times.observe(6, 3.0)
    assert (times.expected(2), times.expected(4), times.expected(6)) == (1.0, 2.0, 3.0)


def test_times_of_more_rows_than_measured_follow_the_line_of_those_measured_and_else_the_square_root() -> (
    None
):
    times = RowTimes()
    for seconds in (9.0, 2.0):
        times.observe(4, seconds)
    assert (times.expected(1), times.expected(16)) == (1.0, 4.0)
    for seconds in (9.0, 3.0):
        times.observe(8, seconds)
    assert times.expected(16) == 5.0
    for seconds in (9.0, 1.0):
        times.observe(10, seconds)
    assert times.expected(20) == 1.0, "more rows never take less time"


@pytest.mark.parametrize("num_before", [1, 30])
def test_a_pause_of_the_machine_hardly_changes_the_time_of_a_size(num_before: int) -> None:
    times = RowTimes()
    for seconds in (9.0, *[1.0] * num_before, 100.0):
        times.observe(4, seconds)
    assert times.expected(4) < 1.03
    times = RowTimes()
    for seconds in (9.0, 100.0, 1.0):
        times.observe(4, seconds)
    assert times.expected(4) == 1.0, "nor does the first one"


def test_times_follow_steps_that_stay_longer() -> None:
    times = RowTimes()
    for seconds in (1.0,) * 20 + (3.0,) * 80:
        times.observe(4, seconds)
    assert times.expected(4) > 2.7


def test_rates_follow_what_was_right() -> None:
    acceptance, own = Acceptance(), Tried()
    for _ in range(40):
        acceptance.note(own, 2, num_drafted=4, num_right=4)
    assert acceptance.rate(own, 2) > 0.95
    assert acceptance.rate(Tried(), 2) > 0.8, "other sequences learn from it"
    for _ in range(40):
        acceptance.note(own, 2, num_drafted=4, num_right=0)
    assert acceptance.rate(own, 2) < 0.2
