"""The controller of mixed steps: measured step times decide how many prompt tokens run beside decodes."""

from math import inf, nan

import pytest
from blockyard.proto.step_costs import StepWork
from blockyard.worker.scheduling.decode_times import MEASURED_FOR_STEPS
from blockyard.worker.scheduling.mixed_steps import (
    FIRST_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    MixedStepController,
    Rates,
)
from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan
from hypothesis import given
from hypothesis import strategies as st

from .scheduling import make_sequence

SEQUENCE = make_sequence(0, [1])
MOST = 2048


def step_of(*num_tokens: int) -> StepPlan:
    return StepPlan(step=0, rows=tuple(ScheduledRow(SEQUENCE, 0, count, True) for count in num_tokens))


def controller(target_seconds: float | None = 0.05) -> MixedStepController:
    return MixedStepController(target_seconds=target_seconds, max_batched_tokens=MOST)


def budget(mixed_steps: MixedStepController) -> int:
    return mixed_steps.prefill_budget(MOST, has_decodes=True)


def test_without_a_target_prompts_beside_decodes_have_the_whole_budget() -> None:
    mixed_steps = controller(None)
    mixed_steps.observe(step_of(1, 500), 9.0)
    assert budget(mixed_steps) == MOST


def test_a_step_without_decodes_has_the_whole_budget() -> None:
    assert controller().prefill_budget(MOST, has_decodes=False) == MOST


def test_a_budget_below_the_limit_stays() -> None:
    assert controller().prefill_budget(7, has_decodes=True) == 7


def test_a_mixed_step_whose_decodes_were_never_measured_is_followed_by_one_of_decodes_alone() -> None:
    mixed_steps = controller()
    mixed_steps.observe(step_of(1, FIRST_CHUNK_TOKENS), 0.05)
    assert budget(mixed_steps) == 0
    assert budget(mixed_steps) > 0


def test_decodes_are_measured_again_after_many_mixed_steps() -> None:
    mixed_steps = controller()
    mixed_steps.observe(step_of(1), 0.01)
    for _ in range(MEASURED_FOR_STEPS):
        mixed_steps.observe(step_of(1, 200), 0.05)
        assert budget(mixed_steps) > 0
    mixed_steps.observe(step_of(1, 200), 0.05)
    assert budget(mixed_steps) == 0


@given(st.floats(1e-5, 1e-2), st.floats(1e-4, 0.05))
def test_the_limit_settles_where_prompts_take_the_target(
    seconds_a_token: float, decode_seconds: float
) -> None:
    mixed_steps = controller()
    for _ in range(400):
        mixed_steps.observe(step_of(1), decode_seconds)
        chunk = budget(mixed_steps) or budget(mixed_steps)
        mixed_steps.observe(step_of(1, chunk), decode_seconds + chunk * seconds_a_token)
    ideal = 0.05 / seconds_a_token
    limit = mixed_steps.limit_tokens
    assert limit is not None
    if ideal >= MOST:
        assert limit == MOST
    elif ideal <= MIN_CHUNK_TOKENS:
        assert limit == MIN_CHUNK_TOKENS
    else:
        assert limit == pytest.approx(ideal, rel=0.3, abs=2)


@given(st.lists(st.tuples(st.integers(1, MOST), st.integers(1, 64), st.floats(-1.0, 10.0)), max_size=60))
def test_the_limit_stays_within_its_bounds(steps: list[tuple[int, int, float]]) -> None:
    mixed_steps = controller()
    for prefill, decodes, seconds in steps:
        mixed_steps.observe(step_of(*[1] * decodes, prefill), seconds)
        limit = mixed_steps.limit_tokens
        assert limit is not None
        assert MIN_CHUNK_TOKENS <= limit <= MOST


def test_forgetting_keeps_the_rate_of_swapping_alone() -> None:
    mixed_steps = controller()
    mixed_steps.rates.swap_blocks_per_second = 5.0
    mixed_steps.observe(step_of(100), 1.0)
    mixed_steps.observe(step_of(1, 1), 1.0)
    rates = mixed_steps.rates
    assert rates.prefill_tokens_per_second > 0
    assert rates.decode_tokens_per_second == 2.0
    mixed_steps.forget_measurements()
    assert mixed_steps.rates == Rates(swap_blocks_per_second=5.0)
    assert mixed_steps.work == StepWork()
    assert mixed_steps.decode_times.expected(2) == 0


def test_the_work_of_all_steps_adds_up() -> None:
    mixed_steps = controller()
    rows = [ScheduledRow(SEQUENCE, start, length, True) for start, length in ((40, 1), (9, 1), (100, 300))]
    for _ in range(3):
        mixed_steps.observe(StepPlan(step=0, rows=tuple(rows)), 0.5)
    mixed_steps.observe(step_of(1), 0.25)
    assert mixed_steps.work == StepWork(
        seconds=1.75,
        steps=4,
        prompt_steps=3,
        prompt_tokens=900,
        excess_tokens=3 * 46,
        decodes=7,
        context_tokens=3 * 51 + 1,
        pairs=3 * (100 * 300 + 300 * 300 // 2),
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, inf, nan])
def test_a_step_without_a_time_counts_for_nothing(seconds: float) -> None:
    mixed_steps = controller()
    mixed_steps.observe(step_of(1, 100), seconds)
    assert mixed_steps.work == StepWork()
    assert mixed_steps.rates == Rates()
