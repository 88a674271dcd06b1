"""The placement study: runs that are kept, parts of a trace, and floors beside rivals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from blockyard.deploy.bench.workloads.mooncake import write_trace

from bench.placement.simulation.simulator import Result, Setup
from bench.placement.simulation.study import Job, Load, Table, kept_file, run_jobs
from bench.placement.simulation.workloads import uniform_groups
from bench.placement.text import rival_floor

LOAD = Load(workload="uniform-groups", rate=2, seconds=1, num_workers=2)


@pytest.fixture(scope="module")
def result() -> Result:
    return Job(load=LOAD, setup=Setup()).run()


@pytest.mark.ci
def test_a_study_goes_on_with_the_results_that_it_kept(result: Result, tmp_path: Path) -> None:
    jobs = [Job(load=LOAD, setup=Setup(seed=seed), tag="prefix") for seed in range(2)]
    kept_file(tmp_path, jobs[0]).write_text(json.dumps(replace(result, reuse=0.25).as_dict()))
    found = {job.setup.seed: one for job, one in run_jobs(jobs, processes=1, keep=tmp_path)}
    assert found[0].reuse == 0.25
    again = {job.setup.seed: one for job, one in run_jobs(jobs, processes=1, keep=tmp_path)}
    assert again == found


def test_seeds_have_parts_of_a_trace_without_overlap(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    whole = uniform_groups(5.0, 12.0, 0)
    write_trace(whole, trace, block_tokens=16)
    load = Load(workload="trace", rate=2, seconds=2, trace=str(trace))
    parts = [load.build(seed) for seed in range(3)]
    assert sum(len(part.requests) for part in parts) == len(whole.requests)
    for part in parts:
        assert all(0 <= request.arrival_seconds < 2 for request in part.requests)
    with pytest.raises(ValueError, match="is over before second 6"):
        load.build(3)


@pytest.mark.parametrize(
    ("ours", "theirs", "holds"),
    [
        ((0.5, 0.6), (0.5, 0.6), True),
        ((0.49, 0.62), (0.5, 0.6), True),
        ((0.495, 0.594), (0.5, 0.6), False),
        ((0.3, 0.8), (0.5, 0.9), False),
    ],
    ids=["equal", "within the spread", "always behind", "far behind"],
)
def test_a_floor_beside_a_rival_allows_the_spread_of_the_seeds(
    result: Result, ours: tuple[float, ...], theirs: tuple[float, ...], holds: bool
) -> None:
    table = Table()
    for tag, values in (("prefix", ours), ("dynamo", theirs)):
        for seed, reuse in enumerate(values):
            table.add(Job(load=LOAD, setup=Setup(seed=seed), tag=tag), replace(result, reuse=reuse))
    assert rival_floor(table, LOAD, "dynamo", "reuse").holds is holds
