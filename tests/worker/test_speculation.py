"""Drafts: which tokens are guessed, how many of them a step verifies, and what wrong ones cost at most."""

import random
from array import array
from collections.abc import Iterable

import pytest
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.speculation.acceptance import Acceptance, Tried
from blockyard.worker.speculation.choice import LEAST_GAIN, most_useful, shares
from blockyard.worker.speculation.row_times import RowTimes
from blockyard.worker.speculation.speculation import Speculation
from blockyard.worker.speculation.suffix_index import ORDERS, SuffixIndex
from hypothesis import given, settings
from hypothesis import strategies as st

from ..properties import examples  # noqa: TID252
from .scheduling import make_sequence


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
        assert (num_rows + sum(odds[:total])) / seconds(num_rows + total) > LEAST_GAIN * alone * 0.999999
    elif odds:
        assert (num_rows + odds[0]) / seconds(num_rows + 1) <= LEAST_GAIN * alone * 1.000001


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
    assert (times.expected(2), times.expected(4), times.expected(24)) == (1.0, 2.0, 6.0)


def test_rates_follow_what_was_right() -> None:
    acceptance, own = Acceptance(), Tried()
    for _ in range(40):
        acceptance.note(own, 2, num_drafted=4, num_right=4)
    assert acceptance.rate(own, 2) > 0.95
    assert acceptance.rate(Tried(), 2) > 0.8, "other sequences learn from it"
    for _ in range(40):
        acceptance.note(own, 2, num_drafted=4, num_right=0)
    assert acceptance.rate(own, 2) < 0.2


class Guesses:
    """Guesses that are right with a probability which the test sets."""

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        return [1] * most, 8

    def forget(self, ended: Iterable[SequenceId]) -> None:
        pass


def seconds_a_token(
    share_right: float, num_sequences: int, a_row: float, *, num_steps: int, drafts: bool = True
) -> float:
    """Time for each token of a model whose steps take 1 second and `a_row` for each row."""
    chance = random.Random(0)
    speculation = Speculation(Guesses())
    sequences = [make_sequence(number, [1, 2, 3], max_tokens=10**6) for number in range(num_sequences)]
    seconds, tokens = 0.0, 0
    for _ in range(num_steps):
        candidates = [(sequence, 10**6) for sequence in sequences]
        may_draft = drafts and speculation.may_draft(num_sequences)
        proposed = speculation.propose(candidates, num_rows=num_sequences, most=256) if may_draft else []
        num_drafts = sum(len(drafted) for _, drafted in proposed)
        tokens += num_sequences
        for sequence, drafted in proposed:
            num_right = 0
            while num_right < len(drafted) and chance.random() < share_right:
                num_right += 1
            speculation.note(sequence, num_drafted=len(drafted), num_right=num_right)
            tokens += num_right
        took = 1.0 + a_row * (num_sequences + num_drafts)
        took *= chance.uniform(0.97, 1.03)
        speculation.observe(num_sequences, num_drafts, took)
        seconds += took
    return seconds / tokens


@pytest.mark.parametrize("share_right", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("num_sequences", [1, 4, 64])
@pytest.mark.parametrize("a_row", [0.01, 0.1, 1.0])
def test_speculation_is_never_slower_than_none(share_right: float, num_sequences: int, a_row: float) -> None:
    none = seconds_a_token(share_right, num_sequences, a_row, num_steps=400, drafts=False)
    assert seconds_a_token(share_right, num_sequences, a_row, num_steps=400) < 1.02 * none


def test_right_drafts_make_a_sequence_that_runs_alone_several_times_faster() -> None:
    none = seconds_a_token(0.95, 1, 0.02, num_steps=400, drafts=False)
    assert seconds_a_token(0.95, 1, 0.02, num_steps=400) < 0.25 * none
