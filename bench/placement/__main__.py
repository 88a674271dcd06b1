"""Study of every placement policy on every workload, in virtual time, and Dynamo's own simulator on the same arrivals.

    python -m bench.placement --trace conversation.jsonl --dynamo-python /path/to/venv/bin/python

Takes about an hour on two cores; `--quick` takes three minutes. With `--keep FOLDER` it goes on where it was ended.
Workers are H200s with Qwen3-8B by a roofline (simulation/profile.py). `prefix` and its rivals have five seeds, other
policies have one. Without `--trace` or `--dynamo-python`, the report leaves out those parts and says so. Loads of
another character are in bench/placement/rivals.py. The defaults of PlacementConfig come from bench/placement/sweep.py.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from blockyard.deploy.bench.workloads.mooncake import write_trace
from blockyard.router.placement.config import PolicyName

from bench.peers.dynamo import RouterMode, run_dynamo
from bench.placement.rivals import rival_jobs
from bench.placement.simulation.mocker import MockerProfile
from bench.placement.simulation.profile import HardwareProfile
from bench.placement.simulation.simulator import Setup
from bench.placement.simulation.study import STANDARD_LOADS, Job, Load, run_table
from bench.placement.text import MOCK_TAG, POLICIES, RIVALS, Findings, floors, text
from bench.plots import draw
from bench.reporting import write_report

PEER_LOADS = tuple(
    Load(workload="shared-prefix", rate=rate, seconds=100, num_workers=num_workers)
    for num_workers in (4, 8)
    for rate in (3, 10)
)
TRACE_BLOCK_TOKENS = 16
MANY_ROUTERS = 4
MANY_ROUTERS_TAG = f"{MANY_ROUTERS} routers"
ROUTER_WORKLOADS = ("uniform-groups", "one-group", "agents")
PEER_POLICIES: tuple[PolicyName, ...] = ("prefix", "dynamo")
PEER_MODES: tuple[RouterMode, ...] = ("kv", "round_robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    seeds: Sequence[int]
    loads: Sequence[Load]
    trace: Path | None
    dynamo_python: Path | None
    processes: int
    keep: Path | None
    has_large: bool
    """Whether to run 64 workers, and a thousand workers for a minute of the trace."""

    @property
    def large_loads(self) -> list[Load]:
        large = [Load(workload="shared-prefix", rate=80, seconds=10, num_workers=64)]
        if self.trace is not None:
            large.append(Load(workload="trace", rate=20, seconds=60, num_workers=1000, trace=str(self.trace)))
        return large if self.has_large else []

    @property
    def router_loads(self) -> list[Load]:
        return [load for load in self.loads if load.workload in ROUTER_WORKLOADS]

    def jobs(self) -> list[Job]:
        """Return all jobs, longest first."""
        jobs = rival_jobs(self.loads, self.seeds)
        jobs += [
            Job(load=load, setup=Setup(policy=policy, seed=self.seeds[0]), tag=policy)
            for load in self.loads
            for policy in POLICIES
            if policy not in RIVALS
        ]
        jobs += [
            Job(load=load, setup=Setup(seed=seed, num_routers=MANY_ROUTERS), tag=MANY_ROUTERS_TAG)
            for load in self.router_loads
            for seed in self.seeds
        ]
        jobs += [
            Job(
                load=load,
                setup=Setup(policy=policy, seed=seed, profile=MockerProfile()),
                tag=MOCK_TAG.format(policy),
            )
            for load in (PEER_LOADS if self.dynamo_python else ())
            for policy in PEER_POLICIES
            for seed in self.seeds
        ]
        jobs += [Job(load=load, setup=Setup(), tag="prefix") for load in self.large_loads]
        return sorted(
            jobs, key=lambda job: -job.load.seconds * job.load.rate * (1 + job.load.num_workers / 100)
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement")
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format")
    parser.add_argument("--dynamo-python", type=Path, help="a Python that has ai-dynamo-runtime 1.6.1")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--keep",
        type=Path,
        help="a folder for the result of each run. A later command of the same code takes it there",
    )
    parser.add_argument("--quick", action="store_true", help="one seed and a few seconds; writes no report")
    options = parser.parse_args()
    loads: tuple[Load, ...] = STANDARD_LOADS
    if options.quick:
        loads = tuple(replace(load, seconds=min(load.seconds, 5.0)) for load in loads)
    study = Study(
        seeds=range(1 if options.quick else options.seeds),
        loads=loads,
        trace=options.trace,
        dynamo_python=options.dynamo_python,
        processes=options.processes,
        keep=options.keep,
        has_large=not options.quick,
    )
    findings = _findings(study)
    if options.quick:
        print(text(findings))
        return
    path = write_report(
        "placement",
        title="Placement: every policy on every workload, in virtual time",
        text=text(findings),
        figures={
            "profile": HardwareProfile().as_dict(),
            "cells": findings.table.as_dict(),
            "dynamo_simulator": findings.peer,
        },
        floors=floors(findings),
        versions={"ai-dynamo-runtime": findings.peer["version"]} if findings.peer else {},
    )
    draw(path)
    print(path.read_text(encoding="utf-8"))


def _findings(study: Study) -> Findings:
    peer = _peer(study.dynamo_python, study.seeds) if study.dynamo_python else {}
    table = run_table(study.jobs(), processes=study.processes, keep=study.keep)
    return Findings(
        loads=study.loads,
        large_loads=study.large_loads,
        router_loads=study.router_loads,
        many_routers=MANY_ROUTERS_TAG,
        table=table,
        peer_loads=PEER_LOADS if peer else (),
        peer=peer,
    )


def _peer(python: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Run Dynamo's own simulator on the arrivals of each load and seed. Return the reuse by load and router mode.

    Reuse is counted at first admission, as ours is, and also with hits after preemptions, which is Dynamo's headline.
    """
    profile, found = MockerProfile(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for load in PEER_LOADS:
            runs: dict[str, list[float]] = {mode: [] for mode in PEER_MODES}
            counted_again: dict[str, list[float]] = {mode: [] for mode in PEER_MODES}
            for seed in seeds:
                trace = Path(folder) / "trace.jsonl"
                write_trace(load.build(seed), trace, block_tokens=TRACE_BLOCK_TOKENS)
                for mode in PEER_MODES:
                    result = run_dynamo(
                        trace,
                        python=python,
                        num_workers=load.num_workers,
                        router_mode=mode,
                        block_size=profile.block_size,
                        num_gpu_blocks=profile.pool_blocks,
                        trace_block_tokens=TRACE_BLOCK_TOKENS,
                        speedup_ratio=profile.speedup_ratio,
                    )
                    runs[mode].append(result.raw["first_admission_prefix_cache_reused_ratio"])
                    counted_again[mode].append(result.reuse)
                    found["version"] = str(result.raw["version"])
            found[load.label] = {
                mode: {"mean": fmean(reuse), "runs": reuse, "with_readmissions": fmean(counted_again[mode])}
                for mode, reuse in runs.items()
            }
    return found


if __name__ == "__main__":
    main()
