"""Study of agents' hints: reuse and time to the first token with `expected_pause_seconds`, right, wrong and hostile.

    python -m bench.placement.hints

Agents wait 5 to 120 s for a tool between two calls, and say so in each call but their last. A *wrong* hint is 0.3 to 3
times the real pause. *Liars* send prompts that nobody sends again, and say that they come back in 60 s. Their requests
do not count in the figures.

`keep` is another rule, for comparison: a hinted block is kept until it is due, and then ages as if it was just used.
The rule of the worker also evicts first what is due last.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import sqrt
from random import Random
from statistics import fmean, stdev

from blockyard.deploy.bench.workloads.requests import PlannedRequest, Workload
from blockyard.worker.cache.prefix_cache import PrefixCache

from bench.placement.caches import WorkerCache, requests_of
from bench.placement.simulation.profile import HardwareProfile
from bench.placement.simulation.simulator import Result, Setup, simulate
from bench.placement.simulation.workloads import independent, tool_agents
from bench.reporting import Floor, write_report

AGENTS_A_SECOND = 0.16
ARRIVAL_SECONDS = 240.0
NUM_WORKERS = 2
GIGABYTES = 40
"""Memory of each worker. The weights take 18 GB."""
BLOCK_TOKENS = 64
SIZES = (2000, 4000, 8000, 16_000)
"""Sizes of one cache, in blocks."""
WRONG = (0.3, 3.0)
LIES_A_SECOND = 0.5
LIE_SECONDS = 60.0

Hint = Callable[[float, Random], float]
HINTS: dict[str, Hint] = {
    "none": lambda pause, chance: 0.0,
    "exact": lambda pause, chance: pause,
    "wrong": lambda pause, chance: pause * WRONG[0] * (WRONG[1] / WRONG[0]) ** chance.random(),
}


def hinted(workload: Workload, hint: Hint, seed: int) -> Workload:
    """Return the workload with what each client says about its next request."""
    chance = Random(f"hints {seed}")
    pauses = {each.follows: each.arrival_seconds for each in workload.requests if each.follows is not None}
    requests = tuple(
        replace(each, expected_pause_seconds=hint(pauses[each.number], chance))
        if each.number in pauses
        else each
        for each in workload.requests
    )
    return replace(workload, requests=requests)


def with_liars(workload: Workload, seconds: float, seed: int) -> Workload:
    """Add requests whose clients claim to come back, and never do."""
    lies = independent(
        "lies", "", LIES_A_SECOND, seconds, seed, prompt_tokens=(4000, 12_000), output_tokens=(20, 50)
    )
    first_number = 1 + max(each.number for each in workload.requests)
    first_token = 1 + max(
        run.base + run.length for each in workload.requests for run in (*each.prompt, each.output)
    )
    moved = tuple(
        replace(
            each,
            number=first_number + each.number,
            prompt=tuple(replace(run, base=first_token + run.base) for run in each.prompt),
            output=replace(each.output, base=first_token + each.output.base),
            expected_pause_seconds=LIE_SECONDS,
        )
        for each in lies.requests
    )
    return replace(workload, requests=(*workload.requests, *moved))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A column of the report."""

    hint: str = "none"
    liars: bool = False
    lies: bool = False
    """Whether the liars hint. Otherwise the same requests say nothing."""
    keeps: bool = False

    @property
    def label(self) -> str:
        words = [
            self.hint,
            "keep" if self.keeps else "",
            "lies" if self.lies else "silent" if self.liars else "",
        ]
        return " + ".join(filter(None, words))

    def build(self, seconds: float, seed: int) -> Workload:
        agents = tool_agents(AGENTS_A_SECOND, seconds, seed)
        workload = hinted(agents, HINTS[self.hint], seed)
        if not self.liars:
            return workload
        full = with_liars(workload, seconds, seed)
        return full if self.lies else replace(full, requests=tuple(_silenced(each) for each in full.requests))


def _silenced(request: PlannedRequest) -> PlannedRequest:
    return request if request.session else replace(request, expected_pause_seconds=0.0)


CASES = (
    Case(),
    Case(hint="exact"),
    Case(hint="exact", keeps=True),
    Case(hint="wrong"),
    Case(liars=True),
    Case(liars=True, lies=True),
    Case(hint="exact", liars=True, lies=True),
)
BASES = {case: CASES[4] if case.liars else CASES[0] for case in CASES}


@contextmanager
def keeping(keeps: bool) -> Iterator[None]:
    """Treat all hinted blocks as shared if `keeps`: they are kept until they are due."""
    original = PrefixCache.first_alone
    if not keeps:
        yield
        return
    PrefixCache.first_alone = lambda self, blocks: len(blocks)  # type: ignore[method-assign]
    try:
        yield
    finally:
        PrefixCache.first_alone = original  # type: ignore[method-assign]


def simulated(case: Case, seconds: float, seed: int) -> Result:
    """Run a case on real routers and workers in virtual time."""
    profile = HardwareProfile(memory_bytes=GIGABYTES * 1e9, max_model_len=65_536, block_size=BLOCK_TOKENS)
    setup = Setup(num_workers=NUM_WORKERS, seed=seed, profile=profile)
    with keeping(case.keeps):
        return simulate(case.build(seconds, seed), setup, counts=lambda request: bool(request.session))


def reuse(case: Case, num_blocks: int, seconds: float, seed: int) -> float:
    """Return the reuse of agents by one pool and prefix cache, which serves one request after the other."""
    cache, hits, tokens = WorkerCache(num_blocks), 0, 0
    with keeping(case.keeps):
        for at, request in enumerate(requests_of(case.build(seconds, seed), BLOCK_TOKENS)):
            found = cache.serve(request, at)
            if request.session:
                hits += found
                tokens += request.prompt_tokens
    return hits * BLOCK_TOKENS / tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Reuse of one case by one cache, as means over the seeds, beside its base."""

    num_blocks: int
    case: str
    reuse: float
    gain: float
    """Reuse less that of the base, which has the same requests without a hint."""
    error: float
    """Standard error of that gain."""

    def cells(self) -> str:
        return (
            f"| {self.num_blocks:,} | {self.case} | {self.reuse:.3f} | {self.gain:+.3f} ± {self.error:.3f} |"
        )


def rows_of(num_blocks: int, seconds: float, seeds: int) -> Iterator[Row]:
    found = {case: [reuse(case, num_blocks, seconds, seed) for seed in range(seeds)] for case in CASES}
    for case, values in found.items():
        gains = [value - base for value, base in zip(values, found[BASES[case]], strict=True)]
        error = stdev(gains) / sqrt(seeds) if seeds > 1 else 0.0
        yield Row(num_blocks=num_blocks, case=case.label, reuse=fmean(values), gain=fmean(gains), error=error)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement.hints")
    parser.add_argument("--seeds", type=int, default=10, help="runs of one cache; default %(default)s")
    parser.add_argument(
        "--cluster-seeds", type=int, default=3, help="runs of the cluster; default %(default)s"
    )
    parser.add_argument(
        "--seconds", type=float, default=ARRIVAL_SECONDS, help="duration of arrivals; default %(default)g"
    )
    options = parser.parse_args()
    rows: list[Row] = []
    for size in SIZES:
        for each in rows_of(size, options.seconds, options.seeds):
            rows.append(each)
            print(each.cells(), flush=True)
    results: dict[str, list[Result]] = {}
    for case in CASES:
        results[case.label] = [
            simulated(case, options.seconds, seed) for seed in range(options.cluster_seeds)
        ]
        print(cluster_cells(case.label, results[case.label]), flush=True)
    path = write_report(
        "agent-hints",
        title="Agents' hints: what the expected pause of a session is worth",
        text=_text(rows, results),
        figures={
            "one cache": [asdict(each) for each in rows],
            "cluster": {label: [one.as_dict() for one in found] for label, found in results.items()},
        },
        floors=_floors(rows, results),
        versions={},
    )
    print(path)


def _floors(rows: Sequence[Row], results: dict[str, list[Result]]) -> list[Floor]:
    hinted_rows = [each for each in rows if each.case in ("exact", "wrong")]
    exact = [each for each in rows if each.case == "exact"]
    means = {label: fmean(each.ttft_mean for each in found) for label, found in results.items()}
    return [
        Floor(
            name="gain of reuse by exact or wrong hints, plus two standard errors, worst",
            value=min(each.gain + 2 * each.error for each in hinted_rows),
            floor=0.0,
            better="higher",
        ),
        Floor(
            name="gain of reuse by exact hints, best size",
            value=max(each.gain for each in exact),
            floor=0.05,
            better="higher",
        ),
        Floor(
            name="mean time to the first token in the cluster by exact hints, over none",
            value=means["exact"] / means["none"],
            floor=0.9,
            better="lower",
        ),
        Floor(
            name="reuse that agents lose by lies, worst",
            value=-min(each.gain for each in rows if each.case.endswith("+ lies")),
            floor=0.05,
            better="lower",
        ),
    ]


def cluster_cells(label: str, found: Sequence[Result]) -> str:
    figures = [fmean(getattr(each, name) for each in found) for name in ("ttft_mean", "ttft_p50", "ttft_p99")]
    milliseconds = " | ".join(f"{1000 * figure:.0f}" for figure in figures)
    shares = [fmean(getattr(each, name) for each in found) for name in ("reuse", "ideal_reuse")]
    return f"| {label} | {shares[0]:.3f} | {milliseconds} | {shares[1]:.3f} |"


def _text(rows: Sequence[Row], results: dict[str, list[Result]]) -> str:
    assert __doc__ is not None
    num_runs = len(results["none"])
    lines = [
        __doc__.partition("\n\n")[2].partition("\n\n")[2],
        "## One cache",
        "",
        "A worker's pool and prefix cache, which serve one request after the other. The gain is that of reuse over the "
        "same requests without hints, with its standard error over the seeds. `silent` are the liars' requests without "
        "their lies: the base of the rows with lies.",
        "",
        f"| blocks of {BLOCK_TOKENS} | hints | reuse | gain |",
        "|---|---|---|---|",
        *(each.cells() for each in rows),
        "",
        "## A cluster",
        "",
        f"Real routers and {NUM_WORKERS} workers (H200 with {GIGABYTES} GB, Qwen3-8B) in virtual time, "
        f"{AGENTS_A_SECOND:g} new agents a second. Runs: {num_runs}. Means, with times to the first token in ms.",
        "",
        "| hints | reuse | mean | p50 | p99 | reuse without limit |",
        "|---|---|---|---|---|---|",
        *(cluster_cells(label, found) for label, found in results.items()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
