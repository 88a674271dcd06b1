"""Parallel runs: a job for each workload, policy and seed, over the machine's cores.

Owns the loads of the study: workloads with their rates, durations and cluster sizes. Does not own the use of the
results (bench/placement/__main__.py, bench/placement/sweep.py).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
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
        """Return the workload of a seed. Of a trace, each seed has a part of its own, one after the other."""
        if self.trace:
            return _part(Path(self.trace), start=seed * self.seconds, seconds=self.seconds, speed=self.rate)
        return GENERATORS[self.workload](self.rate, self.seconds, seed)


def _part(trace: Path, *, start: float, seconds: float, speed: float) -> Workload:
    """Return the requests of a replayed trace from second `start` on. Raise ValueError if there are none."""
    workload = read_trace(trace, seconds=start + seconds, speed=speed)
    requests = tuple(
        replace(request, arrival_seconds=request.arrival_seconds - start)
        for request in workload.requests
        if request.arrival_seconds >= start
    )
    if not requests:
        raise ValueError(f"{trace.name} is over before second {start:g} of its replay")
    return replace(workload, requests=requests)


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
    """Results by load, tag and seed."""

    cells: dict[tuple[str, str], dict[int, Result]] = field(default_factory=dict)

    def add(self, job: Job, result: Result) -> None:
        self.cells.setdefault((job.load.label, job.tag), {})[job.setup.seed] = result

    def mean(self, load: str, tag: str, figure: str) -> float:
        return fmean(self.values(load, tag, figure))

    def values(self, load: str, tag: str, figure: str) -> list[float]:
        return list(self.by_seed(load, tag, figure).values())

    def by_seed(self, load: str, tag: str, figure: str) -> dict[int, float]:
        return {
            seed: float(getattr(result, figure)) for seed, result in sorted(self.cells[load, tag].items())
        }

    def ratios(self, load: str, tag: str, base: str, figure: str) -> list[float]:
        """Return the figure of `tag` over that of `base`, by seed. Both have the same arrivals for a seed."""
        over, under = self.by_seed(load, tag, figure), self.by_seed(load, base, figure)
        return [value / under[seed] for seed, value in over.items() if seed in under]

    def as_dict(self) -> dict[str, Any]:
        return {
            f"{load} | {tag}": {
                figure: {"mean": fmean(found), "least": min(found), "most": max(found)}
                for figure in [field.name for field in fields(Result)]
                for found in [self.values(load, tag, figure)]
            }
            for load, tag in sorted(self.cells)
        }


def run_jobs(
    jobs: Iterable[Job], *, processes: int, keep: Path | None = None
) -> Iterator[tuple[Job, Result]]:
    """Run jobs in parallel, and yield their results as they finish.

    Results in the folder `keep` are taken from there, and new ones are written to it. So a study that was ended goes on
    where it was. The folder does not know which code made them.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running: dict[Future[Result], Job] = {}
        for job in jobs:
            if keep is not None and (file := kept_file(keep, job)).exists():
                yield job, Result(**json.loads(file.read_text(encoding="utf-8")))
            else:
                running[pool.submit(job.run)] = job
        for future in as_completed(running):
            job, result = running[future], future.result()
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                kept_file(keep, job).write_text(json.dumps(result.as_dict()), encoding="utf-8")
            yield job, result


def run_table(jobs: Sequence[Job], *, processes: int, keep: Path | None = None) -> Table:
    """Run jobs as `run_jobs` does, and print how many are done."""
    table = Table()
    for done, (job, result) in enumerate(run_jobs(jobs, processes=processes, keep=keep), start=1):
        table.add(job, result)
        print(f"\r{done}/{len(jobs)} runs", end="", flush=True)
    print()
    return table


def kept_file(folder: Path, job: Job) -> Path:
    return folder / f"{sha256(repr(job).encode()).hexdigest()[:32]}.json"
