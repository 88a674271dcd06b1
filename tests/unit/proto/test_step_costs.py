"""Costs of steps, fitted to their times: right whatever the mix of work, and unharmed by any report."""

from math import inf, isfinite, nan
from random import Random

import pytest
from blockyard.proto.step_costs import (
    EXCESS_FROM_TOKENS,
    FIRST_ROW_SECONDS,
    REFERENCE_PROMPT_TOKENS,
    ROW_SECONDS,
    StepCosts,
    StepWork,
    WorkRows,
    pairs_of,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .machine import MIXES, Machine

ANY_COUNT = st.one_of(st.floats(), st.integers(-(2**70), 2**70))
ANY_WORK = st.builds(StepWork, *[ANY_COUNT] * len(StepWork._fields))
MIX = st.sampled_from(sorted(MIXES))
MACHINES = st.builds(
    Machine,
    step_seconds=st.floats(5e-3, 0.05),
    token_seconds=st.floats(2e-6, 1e-3),
    context_share=st.floats(1e-4, 1e-2),
    pair_share=st.floats(1e-6, 1e-4),
)


def test_pairs_count_each_token_with_all_before_it() -> None:
    assert pairs_of(0, 4) == 8
    assert pairs_of(100, 1) == 100
    assert pairs_of(0, 30) + pairs_of(30, 70) == pairs_of(0, 100)


@examples(15)
@given(MACHINES, st.lists(MIX, min_size=1, max_size=3), st.integers(0, 1000))
def test_the_fit_expects_the_time_of_more_of_the_same_work(machine: Machine, mixes: list[str], seed: int):
    chance, costs = Random(seed), StepCosts()
    for _ in range(120):
        costs.observe(machine.row(chance.choice(mixes), chance))
    for mix in mixes:
        rows = [machine.row(mix, chance) for _ in range(20)]
        seconds = sum(row.seconds for row in rows)
        assert sum(map(costs.seconds, rows)) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("mix", ["chat", "small"])
@pytest.mark.parametrize("step_seconds", [0.005, 0.02])
def test_the_rate_is_that_of_the_reference_step_however_small_the_steps(mix: str, step_seconds: float):
    machine, chance, costs = Machine(step_seconds=step_seconds), Random(0), StepCosts()
    costs.observe(machine.row("trial", chance))
    for _ in range(120):
        costs.observe(machine.row(mix, chance))
    true = REFERENCE_PROMPT_TOKENS / (step_seconds + REFERENCE_PROMPT_TOKENS * machine.token_seconds)
    assert costs.tokens_per_second == pytest.approx(true, rel=0.25)


@given(st.lists(ANY_WORK, max_size=40))
def test_no_report_spoils_the_costs(reports: list[StepWork]) -> None:
    costs = StepCosts()
    for report in reports:
        costs.observe(report)
        assert all(isfinite(cost) and cost >= 0 for cost in costs.costs)
        assert isfinite(costs.tokens_per_second)
        assert isfinite(costs.pair_tokens)


@examples(10)
@given(st.floats(1e-6, 1e6), st.integers(0, 1000))
def test_a_few_absurd_times_change_little(factor: float, seed: int) -> None:
    machine, chance, costs = Machine(), Random(seed), StepCosts()
    for number in range(120):
        row = machine.row("chat", chance)
        costs.observe(row._replace(seconds=row.seconds * factor) if number % 50 == 40 else row)
    row = machine.row("chat", chance)
    assert costs.seconds(row) == pytest.approx(row.seconds, rel=0.15)


def test_nothing_is_measured_before_the_first_row() -> None:
    costs = StepCosts()
    assert not costs.is_measured
    assert (costs.tokens_per_second, costs.pair_tokens, costs.decode_seconds(3, 100)) == (0.0, 0.0, 0.0)
    costs.observe(StepWork(seconds=nan, steps=1))
    assert not costs.is_measured


def test_a_decode_step_costs_more_with_more_sequences_and_more_context() -> None:
    machine, chance, costs = Machine(), Random(0), StepCosts()
    for _ in range(120):
        costs.observe(machine.row("decode", chance))
    assert costs.decode_seconds(1, 0) < costs.decode_seconds(50, 0) < costs.decode_seconds(50, 10**6)
    assert costs.decode_seconds(EXCESS_FROM_TOKENS, 0) <= costs.decode_seconds(EXCESS_FROM_TOKENS + 1, 0)


def test_rows_are_cut_when_they_are_long_enough_and_lose_no_work() -> None:
    rows, taken, total = WorkRows(), [], StepWork()
    for _ in range(1000):
        total = total.plus(StepWork(seconds=0.007, steps=1, decodes=3))
        row = rows.take(total)
        if row is not None:
            taken.append(row)
    assert taken[0].seconds >= FIRST_ROW_SECONDS
    assert taken[0].steps == 1
    assert all(ROW_SECONDS <= row.seconds < ROW_SECONDS + 0.008 for row in taken[1:])
    assert sum(row.decodes for row in taken) == pytest.approx(3 * sum(row.steps for row in taken))
    assert 1000 - sum(row.steps for row in taken) < 15


@pytest.mark.parametrize("seconds", [0.5, -1.0, inf, nan])
def test_a_sum_that_does_not_continue_the_last_one_begins_anew(seconds: float) -> None:
    rows = WorkRows()
    assert rows.take(StepWork(seconds=1.0, steps=1)) is not None
    assert rows.take(StepWork(seconds=seconds, steps=2)) is None
    rows.take(StepWork(seconds=2.0, steps=3))
    assert rows.take(StepWork(seconds=3.0, steps=4)) == StepWork(seconds=1.0, steps=1)
