"""Router, workers and index survive the faults of every seed; and a product that is broken on purpose does not."""

import ast
import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, find, given, note, settings
from hypothesis import strategies as st

from simulation.virtual_time import Stalled, VirtualLoop
from tests.properties import examples

from .mutants import MUTANTS, broken
from .runs import run, run_scenario
from .scenario import FEWEST_REQUESTS, PULL_FAULTS, Kind, Scenario, drawn, pulling, scenario

CHUNKS, QUICK_CHUNKS = 8, 3
RUNS_A_CHUNK = 20
MUTANT_RUNS = 60
"""Runs within which the slowest mutant is found. Most are found in the first few."""
PULL_MUTANT_RUNS = 200
"""The same for mutants of pulls."""

SCENARIOS = st.builds(drawn, st.randoms(use_true_random=False), st.integers(0, 1000))
DRAWING = examples(40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
AS_DRAWN = settings(DRAWING, phases=(Phase.explicit, Phase.generate), print_blob=True)
"""A failing scenario is shown without shrinking, which takes longer than a test may."""


@pytest.mark.ci
@pytest.mark.parametrize(
    "chunk",
    [pytest.param(chunk, marks=pytest.mark.slow if chunk >= QUICK_CHUNKS else ()) for chunk in range(CHUNKS)],
)
def test_no_order_of_faults_breaks_an_invariant(chunk: int) -> None:
    """`python -m tests.simulation --runs 1 --seed SEED --log` shows a seed that fails."""
    seeds = range(chunk * RUNS_A_CHUNK, (chunk + 1) * RUNS_A_CHUNK)
    results = [run(seed) for seed in seeds]
    assert {result.seed: result.violation for result in results if result.violation} == {}
    # Runs in which nothing happens would prove nothing.
    struck, outcomes = Counter[Kind](), Counter[str]()
    for result in results:
        struck.update(result.struck)
        outcomes.update(result.outcomes)
    assert len(struck) >= len(Kind) - 6
    assert outcomes["finished"] > 3 * RUNS_A_CHUNK
    assert outcomes["CANCELLED"]
    assert outcomes["DEADLINE_EXCEEDED"]
    assert sum(result.num_moves for result in results) > 0
    may_split = any({"prefill"} < set(scenario(seed).roles) for seed in seeds)
    assert (sum(result.num_splits for result in results) > 0) == may_split
    assert sum(result.pulls["WHOLE"] for result in results) > 0


@pytest.mark.ci
@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, CHUNKS))]
)
def test_no_fault_of_a_pull_breaks_an_invariant(chunk: int) -> None:
    """`python -m tests.simulation --pulls --runs 1 --seed SEED --log` shows a seed that fails."""
    seeds = range(chunk * RUNS_A_CHUNK, (chunk + 1) * RUNS_A_CHUNK)
    results = [run_scenario(pulling(seed)) for seed in seeds]
    assert {result.seed: result.violation for result in results if result.violation} == {}
    struck, pulls = Counter[Kind](), Counter[str]()
    for result in results:
        struck.update(result.struck)
        pulls.update(result.pulls)
    assert struck.keys() >= {*PULL_FAULTS, Kind.KILL, Kind.HANG, Kind.FLUSH}
    assert pulls.keys() >= {
        "WHOLE",
        "FEWER",
        "LATE",
        "CORRUPT",
        "CUT",
        "REFUSED",
        "CANCELLED",
        "AVOIDED",
        "mutual",
    }


@given(scenario=SCENARIOS)
@AS_DRAWN
def test_no_scenario_that_hypothesis_draws_breaks_an_invariant(scenario: Scenario) -> None:
    note(scenario.describe())
    assert run_scenario(scenario).violation == ""


@pytest.mark.slow
def test_what_breaks_a_broken_product_is_shortened() -> None:
    with broken("relay: a token is doubled"):
        shortest = find(SCENARIOS, lambda scenario: bool(run_scenario(scenario).violation), settings=DRAWING)
    assert len(shortest.requests) == FEWEST_REQUESTS
    assert not shortest.faults, "none is needed for it"


@pytest.mark.parametrize(
    ("folders", "forbidden"),
    [
        (("proto", "kernels", "worker", "router", "deploy"), {"simulation", "bench", "tests"}),
        (("simulation",), {"bench", "tests"}),
    ],
)
def test_imports_point_from_tests_and_bench_to_the_simulation_and_from_it_to_the_product(
    folders: tuple[str, ...], forbidden: set[str]
) -> None:
    root = Path(__file__).parents[3]
    sources = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert sources
    assert {str(path): found for path in sources if (found := _imported(path) & forbidden)} == {}


def _imported(source: Path) -> set[str]:
    """Return the top-level names of what it imports."""
    nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


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


@pytest.mark.parametrize("seed", range(0, 200, 50))
def test_a_seed_is_the_same_run_each_time(seed: int) -> None:
    first, second = run(seed), run(seed)
    assert first.log == second.log
    assert len(first.log) > 50
    assert run(seed + 1).log != first.log


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_product_is_found(mutant: str) -> None:
    is_of_pulls = mutant.startswith(("pulls:", "loans:", "transfers:"))
    chosen, runs = (pulling, PULL_MUTANT_RUNS) if is_of_pulls else (scenario, MUTANT_RUNS)
    with broken(mutant):
        assert any(run_scenario(chosen(seed)).violation for seed in range(runs))
