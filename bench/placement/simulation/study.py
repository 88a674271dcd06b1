"""Parallel runs: a job for each workload, policy and seed, over the machine's cores.

Owns the loads of the study: workloads with their rates, durations and cluster sizes. Does not own the use of the
results (bench/placement/__main__.py, bench/placement/sweep.py).
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from blockyard.deploy.bench.workloads.mooncake import read_trace
from blockyard.deploy.bench.workloads.requests import Workload

from bench.placement.simulation.simulator import Result, Setup, simulate
from bench.placement.simulation.workloads import GENERATORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A workload and its cluster. If `trace`, a path, is given, `rate` is the factor of the trace's own pace."""

    workload: str
    rate: float
    seconds: float
    num_workers: int = 8
    trace: str = ""
    slowness: tuple[float, ...] = ()
    """Factor of step times of the first workers, as in Setup."""
    num_joiners: int = 0
    join_seconds: float = 0.0

    @property
    def label(self) -> str:
        unit = "x" if self.trace else "/s"
        slow = f" ({len(self.slowness)} slow)" if self.slowness else ""
        joined = f" ({self.num_joiners} join late)" if self.num_joiners else ""
        return f"{self.workload} {self.rate:g}{unit} on {self.num_workers}{slow}{joined}"

    def setup(self, setup: Setup) -> Setup:
        """Return the setup with this load's cluster."""
        return replace(
            setup,
            num_workers=self.num_workers,
            slowness=self.slowness,
            num_joiners=self.num_joiners,
            join_seconds=self.join_seconds,
        )

    def build(self, seed: int) -> Workload:
        if self.trace:
            return read_trace(Path(self.trace), seconds=self.seconds, speed=self.rate)
        return GENERATORS[self.workload](self.rate, self.seconds, seed)


STANDARD_LOADS = (
    Load(workload="shared-prefix", rate=3, seconds=100),
    Load(workload="shared-prefix", rate=10, seconds=30),
    Load(workload="shared-prefix", rate=30, seconds=15),
    Load(workload="shared-prefix", rate=60, seconds=8),
    Load(workload="multi-turn", rate=4, seconds=25),
    Load(workload="agents", rate=1.5, seconds=25),
    Load(workload="nothing-shared", rate=30, seconds=15),
    Load(workload="one-group", rate=40, seconds=15),
    Load(workload="long-prompts", rate=6, seconds=30),
    Load(workload="uniform-groups", rate=20, seconds=25, num_workers=4),
)


RIVAL_LOADS = (
    Load(workload="bursts", rate=20, seconds=16),
    Load(workload="shifting", rate=20, seconds=15),
    Load(workload="shifting", rate=15, seconds=15, slowness=(4.0, 2.0, 2.0)),
    Load(workload="shifting", rate=15, seconds=15, num_joiners=4, join_seconds=5.0),
    Load(workload="pausing-agents", rate=3, seconds=15),
    Load(workload="short-beside-long", rate=60, seconds=10),
)
"""Loads of different character, on which `prefix` must not be behind any rival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    load: Load
    setup: Setup
    tag: str = ""
    """Label that distinguishes this job from others with the same load."""

    def run(self) -> Result:
        return simulate(self.load.build(self.setup.seed), self.load.setup(self.setup))


@dataclass(slots=True)
class Table:
    """Results by load and tag, one per seed."""

    cells: dict[tuple[str, str], list[Result]] = field(default_factory=dict)

    def add(self, job: Job, result: Result) -> None:
        self.cells.setdefault((job.load.label, job.tag), []).append(result)

    def mean(self, load: str, tag: str, figure: str) -> float:
        return fmean(self.values(load, tag, figure))

    def values(self, load: str, tag: str, figure: str) -> list[float]:
        return [float(getattr(result, figure)) for result in self.cells[load, tag]]

    def as_dict(self) -> dict[str, Any]:
        return {
            f"{load} | {tag}": {
                figure: {"mean": fmean(found), "least": min(found), "most": max(found)}
                for figure in results[0].as_dict()
                for found in [[float(getattr(result, figure)) for result in results]]
            }
            for (load, tag), results in sorted(self.cells.items())
        }


def run_jobs(jobs: Iterable[Job], *, processes: int) -> Iterator[tuple[Job, Result]]:
    """Run jobs in parallel, and yield their results as they finish."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(job.run): job for job in jobs}
        for future in as_completed(running):
            yield running[future], future.result()
