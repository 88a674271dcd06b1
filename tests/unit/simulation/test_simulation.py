"""Router, workers and index survive the faults of some seeds. tests/nightly/simulation tries more of them."""

import asyncio

import pytest
from hypothesis import HealthCheck, Phase, given, note
from hypothesis import strategies as st

from simulation.virtual_time import Stalled, VirtualLoop
from tests.properties import examples

from .runs import run, run_scenario
from .scenario import Scenario, drawn, pulling

AS_DRAWN = examples(
    20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=(Phase.explicit, Phase.generate),
    print_blob=True,
)
"""A failing scenario is shown without shrinking, which takes longer than a test may."""


@given(scenario=st.builds(drawn, st.randoms(use_true_random=False), st.integers(0, 1000)))
@AS_DRAWN
def test_no_scenario_that_hypothesis_draws_breaks_an_invariant(scenario: Scenario) -> None:
    note(scenario.describe())
    assert run_scenario(scenario).violation == ""


@pytest.mark.parametrize("seed", range(6))
def test_no_fault_of_a_pull_breaks_an_invariant(seed: int) -> None:
    """`python -m tests.nightly.simulation --pulls --runs 1 --seed SEED --log` shows a seed that fails."""
    result = run_scenario(pulling(seed))
    assert result.violation == ""
    assert result.pulls["WHOLE"]


@pytest.mark.parametrize("seed", range(50, 200, 25))
def test_a_seed_is_the_same_run_each_time_and_breaks_no_invariant(seed: int) -> None:
    first, second = run(seed), run(seed)
    assert first.violation == ""
    assert first.log == second.log
    assert len(first.log) > 50
    assert run(seed + 1).log != first.log


def test_a_time_at_which_something_happens_without_end_is_noticed() -> None:
    async def sleep_for_too_little() -> None:
        while True:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(1e-12)

    loop = VirtualLoop()
    try:
        loop.run_until_complete(asyncio.sleep(1e6))
        with pytest.raises(Stalled, match="no time passes"):
            loop.run_until_complete(sleep_for_too_little())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
