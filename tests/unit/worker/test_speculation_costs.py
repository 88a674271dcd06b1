"""Speculation is never slower than none, in virtual time: whatever rows cost, guesses are worth and clocks say.

Bounds leave 2 %: 0.5 % that trials may cost, what is lost before anything is known, and estimates from noisy times.
"""

from dataclasses import replace

import pytest
from blockyard.worker.speculation.draft_model import MAX_ALLOWANCE_SECONDS
from blockyard.worker.speculation.speculation import RARE_TRIAL_STEPS, Speculation
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .scheduling import make_sequence
from .virtual_steps import Costs, Guesses, Right, batches, steady, steady_clock

LEAST = 0.98
SHARES = (0.0, 0.3, 0.6, 0.9)
A_ROW = (0.0, 0.005, 0.02, 0.05, 0.1, 0.3, 1.0)
"""Rows from free ones to those of a step whose time is proportional to them."""
A_PASS = (0.1, 0.9, 0.01, 0.3, 2.0)
"""Seconds of a pass of a draft model, where a step takes 1 without its rows."""
NOISY = {"noise": 0.1, "pauses": 0.02}
QUIET_AND_NOISY = [
    *(Costs(a_row=a_row, first=0.5) for a_row in A_ROW),
    *(Costs(a_row=a_row, first=0.5, **NOISY) for a_row in A_ROW),
]


def always(share: float) -> Right:
    return lambda sequence, step: share


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("batch", [8, 64, 1, 2, 4, 16, 32])
@pytest.mark.parametrize("costs", QUIET_AND_NOISY, ids=str)
def test_no_batch_is_slower_whatever_its_size_and_acceptance(costs: Costs, batch: int) -> None:
    """Neither a full one, nor one whose requests end together without speculation."""
    # Without speculation such a batch never has the sizes that are left when some end.
    unlike = replace(costs, first=0.0)
    for share in SHARES:
        assert steady(costs, batch, always(share), num_steps=800) >= LEAST, share
        gains = batches(unlike, batch, always(share), num_batches=8)
        assert min(gains.full, gains.request, gains.whole) >= LEAST, (share, gains)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("a_pass", A_PASS)
@pytest.mark.parametrize("noise", [{}, NOISY], ids=["quiet", "noisy"])
def test_nor_is_one_whose_guesses_cost_the_time_of_a_draft_model(
    a_pass: float, noise: dict[str, float], batch: int
) -> None:
    for a_row in (0.0, 0.05, 0.3):
        costs = Costs(a_row=a_row, a_pass=a_pass, a_pass_token=0.1 * a_row, **noise)
        for share in SHARES:
            ratio = steady(costs, batch, always(share), num_steps=800, prompt_tokens=300)
            assert ratio >= LEAST, (a_row, share)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("a_pass", A_PASS)
def test_nor_are_new_requests_whose_prompts_a_draft_model_must_compute(a_pass: float, batch: int) -> None:
    for share in SHARES:
        costs = Costs(a_row=0.02, a_pass=a_pass, a_pass_token=0.01, **NOISY)
        gains = batches(costs, batch, always(share), num_batches=12, prompt_tokens=400)
        assert min(gains.full, gains.request, gains.whole) >= LEAST, (share, gains)


def test_a_model_as_slow_as_the_served_one_is_asked_in_rare_trials_alone() -> None:
    clock = steady_clock(Costs(a_row=0.0, a_pass=1.0), 1, always(1.0), num_steps=4 * RARE_TRIAL_STEPS)
    assert clock.num_drafts < 4 * 3


def test_catching_up_is_bounded_where_it_brings_nothing_and_not_where_it_pays() -> None:
    costs = Costs(a_row=0.02, a_pass=0.02, a_pass_token=0.001)
    shares = {}
    for share in (0.0, 0.9):
        clock = steady_clock(costs, 4, always(share), num_steps=1000, prompt_tokens=800)
        shares[share] = clock.caught_up_seconds
    # What an engine starts with, and its share of the time.
    assert 0 < shares[0.0] < MAX_ALLOWANCE_SECONDS + 0.01 * 1000
    assert shares[0.9] > 4 * 800 * 0.001


@examples(12, deadline=None)
@given(
    a_row=st.floats(0.0, 1.0),
    tile=st.sampled_from([0, 4, 8, 16]),
    a_tile=st.floats(0.0, 1.0),
    batch=st.integers(1, 64),
    shares=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    noise=st.floats(0.0, 0.15),
    seed=st.integers(0, 2**20),
)
def test_nor_is_any_where_times_jump_and_acceptance_changes_half_way(
    a_row: float,
    tile: int,
    a_tile: float,
    batch: int,
    shares: tuple[float, float],
    noise: float,
    seed: int,
) -> None:
    costs = Costs(a_row=a_row, tile=tile, a_tile=a_tile, noise=noise, pauses=0.02)
    ratio = steady(costs, batch, lambda sequence, step: shares[step >= 400], num_steps=800, seed=seed)
    assert ratio >= LEAST


@examples(8, deadline=None)
@given(
    a_row=st.floats(0.0, 1.0),
    batch=st.integers(2, 32),
    kinds=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=5),
    seed=st.integers(0, 2**20),
)
def test_nor_is_a_batch_whose_sequences_differ(
    a_row: float, batch: int, kinds: list[float], seed: int
) -> None:
    costs = Costs(a_row=a_row, **NOISY)
    ratio = steady(
        costs, batch, lambda sequence, step: kinds[sequence % len(kinds)], num_steps=800, seed=seed
    )
    assert ratio >= LEAST


A_MODEL = {"a_row": 0.02, "a_pass_token": 0.001}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("costs", "batch", "share", "least"),
    [
        (Costs(a_row=0.02), 8, 0.9, 2.3),
        (Costs(a_pass=0.1, **A_MODEL), 1, 0.6, 1.3),
        (Costs(a_row=0.0), 64, 0.6, 1.4),
        (Costs(a_row=0.02), 1, 0.9, 4.0),
        (Costs(a_row=0.02), 1, 0.6, 1.5),
        (Costs(a_row=0.02), 8, 0.6, 1.3),
        (Costs(a_row=0.02), 32, 0.9, 1.2),
        (Costs(a_row=0.1), 4, 0.9, 1.6),
        (Costs(a_row=0.3), 1, 0.9, 1.3),
        (Costs(a_pass=0.0, **A_MODEL), 1, 0.9, 4.0),
        (Costs(a_pass=0.1, **A_MODEL), 1, 0.9, 2.5),
        (Costs(a_pass=0.1, **A_MODEL), 8, 0.9, 1.5),
        (Costs(a_pass=0.3, **A_MODEL), 1, 0.9, 1.5),
    ],
    ids=str,
)
def test_drafts_that_pay_are_found(costs: Costs, batch: int, share: float, least: float) -> None:
    prompts = {} if costs.a_pass is None else {"prompt_tokens": 300}
    for each in (costs, replace(costs, **NOISY)):
        assert steady(each, batch, always(share), num_steps=1500, **prompts) > least


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("batch", [1, 8])
def test_guesses_that_become_right_are_found_although_trials_had_become_rare(batch: int) -> None:
    for costs in (Costs(a_row=0.02), Costs(a_row=0.02, **NOISY)):
        ratio = steady(costs, batch, lambda sequence, step: 0.9 * (step >= 2000), num_steps=6000)
        assert ratio > 1.4


@pytest.mark.parametrize("seed", range(3))
def test_sequences_that_had_bad_luck_get_drafts_again(seed: int) -> None:
    """Otherwise the others get all drafts, and these end later than without speculation, in longer steps."""
    costs = Costs(a_row=0.005, **NOISY)
    assert batches(costs, 64, always(0.6), num_batches=6, seed=seed).whole > 1.0


def test_trials_that_lose_become_rare() -> None:
    seldom = steady_clock(Costs(a_row=0.3), 16, always(0.0), num_steps=20 * RARE_TRIAL_STEPS)
    often = steady_clock(Costs(a_row=0.3), 16, always(0.0), num_steps=RARE_TRIAL_STEPS)
    assert often.num_drafts > 0
    assert seldom.num_drafts - often.num_drafts < 2 * 20 * 2


def test_a_sequence_whose_drafts_are_always_wrong_rests() -> None:
    drafts = {0: 0, 1: 0}

    def right(sequence: int, step: int) -> float:
        drafts[sequence] += step >= 500
        return 0.9 * (sequence == 1)

    steady_clock(Costs(a_row=0.0), 2, right, num_steps=1500)
    assert drafts[1] > 700
    assert 0 < drafts[0] < 15, "though its rows are free"


def test_the_first_step_of_a_size_is_charged_to_the_drafts_that_gave_it_this_size() -> None:
    speculation, sequence = Speculation(Guesses()), make_sequence(0, [1, 2, 3], max_tokens=1000)
    for _ in range(20):
        speculation.observe(1, 0, 1.0)
    assert speculation.may_draft(1)
    speculation.note(sequence, num_drafted=1, num_right=0)
    speculation.observe(1, 1, 9.0)
    for _ in range(3):
        assert not speculation.may_draft(1)
        speculation.observe(1, 0, 1.0)
