"""Router, workers and index survive the faults of many seeds; and a product that is broken on purpose does not."""

from collections import Counter

import pytest

from tests.unit.simulation.runs import run, run_scenario
from tests.unit.simulation.scenario import PULL_FAULTS, Kind, pulling, scenario

from .mutants import MUTANTS

CHUNKS = 8
RUNS_A_CHUNK = 20
MUTANT_RUNS = 60
"""Runs within which the slowest mutant is found. Most are found in the first few."""
PULL_MUTANT_RUNS = 200
"""The same for mutants of pulls."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_order_of_faults_breaks_an_invariant(chunk: int) -> None:
    """`python -m tests.nightly.simulation --runs 1 --seed SEED --log` shows a seed that fails."""
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
    assert chunk > 0 or sum(result.num_moves for result in results) > 0
    may_split = any({"prefill"} < set(scenario(seed).roles) for seed in seeds)
    assert (sum(result.num_splits for result in results) > 0) == may_split
    assert sum(result.pulls["WHOLE"] for result in results) > 0


PULL_ENDS = {"WHOLE", "FEWER", "LATE", "CORRUPT", "CUT", "REFUSED", "CANCELLED", "AVOIDED", "mutual"}


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_fault_of_a_pull_breaks_an_invariant(chunk: int) -> None:
    """`python -m tests.nightly.simulation --pulls --runs 1 --seed SEED --log` shows a seed that fails."""
    results = [run_scenario(pulling(chunk * RUNS_A_CHUNK + number)) for number in range(RUNS_A_CHUNK)]
    assert {result.seed: result.violation for result in results if result.violation} == {}
    struck, pulls = Counter[Kind](), Counter[str]()
    for result in results:
        struck.update(result.struck)
        pulls.update(result.pulls)
    assert struck.keys() >= {*PULL_FAULTS, Kind.KILL, Kind.HANG, Kind.FLUSH}
    assert chunk > 0 or pulls.keys() >= PULL_ENDS


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_product_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_of_pulls = mutant.startswith(("pulls:", "loans:", "transfers:"))
    chosen, runs = (pulling, PULL_MUTANT_RUNS) if is_of_pulls else (scenario, MUTANT_RUNS)
    owner, method, change = MUTANTS[mutant]
    monkeypatch.setattr(owner, method, change(getattr(owner, method)))
    assert any(run_scenario(chosen(seed)).violation for seed in range(runs))
