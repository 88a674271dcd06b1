"""Study of agents' hints: reuse and time to the first token with `expected_pause_seconds`, right, wrong and hostile.

    python -m bench.placement.hints --seeds 3

Real routers and workers in virtual time. Agents wait 5 to 120 s for a tool between two calls, and say so in each call
but their last. A *wrong* hint is 0.3 to 3 times the real pause. *Liars* send prompts that nobody sends again, and say
that they come back in 60 s. Their requests do not count in the figures.

`keep` is another rule, for comparison: a hinted block is kept until it is due, and then ages as if it was just used.
The rule of the worker also evicts first what is due last.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import fmean, stdev

from blockyard.deploy.bench.workloads.requests import PlannedRequest, Workload
from blockyard.worker.cache.prefix_cache import PrefixCache

from bench.placement.simulation.profile import HardwareProfile
from bench.placement.simulation.simulator import Result, Setup, simulate
from bench.placement.simulation.workloads import independent, tool_agents
from bench.reporting import Floor, write_report

AGENTS_A_SECOND = 0.16
ARRIVAL_SECONDS = 240.0
NUM_WORKERS = 2
GIGABYTES = (40, 56)
"""Memory of each worker. The weights take 18 GB."""
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
def keeping() -> Iterator[None]:
    """Treat all hinted blocks as shared: they are kept until they are due."""
    original = PrefixCache.first_alone
    PrefixCache.first_alone = lambda self, blocks: len(blocks)  # type: ignore[method-assign]
    try:
        yield
    finally:
        PrefixCache.first_alone = original  # type: ignore[method-assign]


def run(case: Case, gigabytes: int, seconds: float, seed: int) -> Result:
    profile = HardwareProfile(memory_bytes=gigabytes * 1e9, max_model_len=65_536, block_size=64)
    setup = Setup(num_workers=NUM_WORKERS, seed=seed, profile=profile)
    workload = case.build(seconds, seed)
    counts = lambda request: bool(request.session)  # noqa: E731
    if case.keeps:
        with keeping():
            return simulate(workload, setup, counts=counts)
    return simulate(workload, setup, counts=counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of one case on one size of memory, as means over the seeds, beside those of its base."""

    gigabytes: int
    case: str
    reuse: float
    ideal: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    gain: float
    """Reuse less that of the base, which has the same requests without a hint."""
    spread: float
    """Standard deviation of that gain over the seeds."""
    mean_ratio: float
    """Mean time to the first token over that of the base, as the mean of the seeds' ratios."""
    p99_ratio: float

    def cells(self) -> str:
        shown = [
            str(self.gigabytes), self.case, f"{self.reuse:.3f}", f"{self.gain:+.3f} ± {self.spread:.3f}",
            f"{1000 * self.ttft_mean:.0f}", f"{self.mean_ratio:.2f}", f"{1000 * self.ttft_p50:.0f}",
            f"{1000 * self.ttft_p99:.0f}", f"{self.p99_ratio:.2f}", f"{self.ideal:.3f}",
        ]  # fmt: skip
        return "| " + " | ".join(shown) + " |"


def row(case: Case, gigabytes: int, results: Sequence[Result], bases: Sequence[Result]) -> Row:
    gains = [result.reuse - base.reuse for result, base in zip(results, bases, strict=True)]
    ratios = {
        name: fmean(
            getattr(result, name) / getattr(base, name) for result, base in zip(results, bases, strict=True)
        )
        for name in ("ttft_mean", "ttft_p99")
    }
    return Row(
        gigabytes=gigabytes,
        case=case.label,
        reuse=fmean(result.reuse for result in results),
        ideal=fmean(result.ideal_reuse for result in results),
        ttft_mean=fmean(result.ttft_mean for result in results),
        ttft_p50=fmean(result.ttft_p50 for result in results),
        ttft_p99=fmean(result.ttft_p99 for result in results),
        gain=fmean(gains),
        spread=stdev(gains) if len(gains) > 1 else 0.0,
        mean_ratio=ratios["ttft_mean"],
        p99_ratio=ratios["ttft_p99"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement.hints")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--gigabytes",
        type=int,
        nargs="+",
        default=GIGABYTES,
        help="memory of each worker; default %(default)s",
    )
    parser.add_argument("--seconds", type=float, default=ARRIVAL_SECONDS, help="duration of arrivals")
    options = parser.parse_args()
    rows: list[Row] = []
    for gigabytes in options.gigabytes:
        results: dict[Case, list[Result]] = {}
        for case in CASES:
            results[case] = [run(case, gigabytes, options.seconds, seed) for seed in range(options.seeds)]
            rows.append(row(case, gigabytes, results[case], results[BASES[case]]))
            print(rows[-1].cells(), flush=True)
    print(
        write_report(
            "agent-hints",
            title="Agents' hints: what the expected pause of a session is worth",
            text=_text(rows),
            figures={"rows": [asdict(each) for each in rows]},
            floors=_floors(rows),
            versions={},
        )
    )


def _floors(rows: Sequence[Row]) -> list[Floor]:
    honest = [each for each in rows if each.case in ("exact", "wrong", "exact + lies")]
    short = [
        each
        for each in rows
        if each.case == "exact" and each.gigabytes == min(other.gigabytes for other in rows)
    ]
    return [
        Floor(
            name="gain of reuse by exact or wrong hints, plus two spreads, worst",
            value=min(each.gain + 2 * each.spread for each in honest),
            floor=0.0,
            better="higher",
        ),
        Floor(
            name="gain of reuse by exact hints where memory is shortest",
            value=min(each.gain for each in short),
            floor=0.02,
            better="higher",
        ),
        Floor(
            name="mean time to the first token by exact hints over none, where memory is shortest",
            value=max(each.mean_ratio for each in short),
            floor=0.95,
            better="lower",
        ),
        Floor(
            name="loss of reuse of silent agents by liars, beside the same requests without lies, worst",
            value=-min(each.gain for each in rows if each.case == "none + lies"),
            floor=0.03,
            better="lower",
        ),
    ]


def _text(rows: Sequence[Row]) -> str:
    assert __doc__ is not None
    heading = [
        "GB", "hints", "reuse", "gain", "mean first token (ms)", "over none", "p50 (ms)", "p99 (ms)", "over none",
        "no limit",
    ]  # fmt: skip
    lines = [
        __doc__.partition("\n\n")[2].partition("\n\n")[2],
        f"{NUM_WORKERS} workers (H200, Qwen3-8B) with so many GB of memory each, {AGENTS_A_SECOND:g} new agents a "
        f"second. The gain is that of reuse over the same requests without hints, with its deviation over the seeds. "
        "`silent` are the liars' requests without their lies, which are the base of the rows with lies.",
        "",
        "| " + " | ".join(heading) + " |",
        "|---" * len(heading) + "|",
        *(each.cells() for each in rows),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
