"""Figures and floors of the router benchmark. Pure. Does not own their text (report.py) or plot (plot.py).

A spread is from the lowest to the highest median of a repeat. A percentile is over the calls of all repeats.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.reporting import Floor, percentile
from bench.router.flame import Shares
from bench.router.load import Delays
from bench.router.placement import PlacementTimes
from bench.router.systems import BEFORE, HTTP, OURS, OVER_HTTP, PLAINTEXT, SESSION, SGLANG
from bench.router.trials import LoadTrial, RequestTrial

PLACEMENT_FLOOR_MS = 1.0
STALL_FLOOR_MS = 5.0
THROUGHPUT_FLOOR = 0.97
"""Minimum throughput with TLS between router and workers, as a share of that without."""
REQUEST_FLOOR_MS = 5.0
CORE_FLOOR = 25_000.0
"""Least tokens/s over HTTP for each core of the router."""
TOP_FRAMES = 8
Figures = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Results:
    """Results of the repeats."""

    placement: list[PlacementTimes] = field(default_factory=list)
    tokenizing: dict[str, list[float]] = field(default_factory=dict)
    tokenizing_tokens: int = 0
    one_stream: dict[str, list[Delays]] = field(default_factory=dict)
    load: dict[int, dict[str, list[LoadTrial]]] = field(default_factory=dict)
    """Trials by number of streams and by system."""
    requests: dict[str, list[RequestTrial]] = field(default_factory=dict)
    """Trials of the CPU time of a request, by system."""
    processes: dict[int, list[LoadTrial]] = field(default_factory=dict)
    """Trials by number of router processes."""
    flame: Shares | None = None
    foreign_cores: dict[str, list[float]] = field(default_factory=dict)
    """Cores that other programs used in each repeat, by part of the run. A trial of many streams has its own figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of a run, for its report."""

    repeats: int
    step_seconds: float
    prompt_tokens: int
    sglang_version: str | None
    many_streams: int
    request_tokens: tuple[int, int]
    """Prompt and generated tokens of a request whose CPU time is measured."""


def spread(repeats: Sequence[Sequence[float]]) -> Figures:
    """Summarise the values of one quantity, given repeat by repeat."""
    pooled = [value for values in repeats for value in values]
    medians = [median(values) for values in repeats]
    return {
        "p50": round(percentile(pooled, 0.5), 3),
        "p99": round(percentile(pooled, 0.99), 3),
        "p50_lowest": round(min(medians), 3),
        "p50_highest": round(max(medians), 3),
    }


def middle(values: Iterable[float]) -> Figures:
    """Summarise one number per repeat."""
    known = sorted(values)
    return {"median": round(median(known), 2), "lowest": round(known[0], 2), "highest": round(known[-1], 2)}


def added(one_stream: Mapping[str, Figures]) -> Figures:
    """Return the delay that each router adds: its percentiles less those of the direct way."""
    return {
        router: {
            f"{way}_{share}": round(one_stream[router][way][share] - one_stream[direct][way][share], 3)
            for way in ("first", "later")
            for share in ("p50", "p99")
        }
        for router, direct in ((OURS, SESSION), (SGLANG, HTTP))
        if router in one_stream
    }


def figures_of(results: Results, setting: Setting) -> Figures:
    one_stream = {name: _ways(known) for name, known in results.one_stream.items()}
    return {
        "repeats": setting.repeats,
        "step_seconds": setting.step_seconds,
        "prompt_tokens": setting.prompt_tokens,
        "placement_ms": _placement(results.placement),
        "tokenizing_ms": {name: spread([times]) for name, times in results.tokenizing.items()},
        "tokenizing_tokens": results.tokenizing_tokens,
        "one_stream_ms": one_stream,
        "added_ms": added(one_stream),
        "streams": {
            str(streams): {name: _load(trials) for name, trials in systems.items()}
            for streams, systems in results.load.items()
        },
        "request_cpu_ms": {
            name: {
                part: middle(getattr(trial, part) for trial in trials)
                for part in ("router", "tokenizer", "whole")
            }
            for name, trials in results.requests.items()
        },
        "throughput_share": {
            str(streams): throughput_shares(systems) for streams, systems in results.load.items()
        },
        "router_processes": {str(number): _load(trials) for number, trials in results.processes.items()},
        "longest_stall_ms": {
            STALL_NAMES[name].format(streams): _stalls(trials)
            for streams, systems in results.load.items()
            for name, trials in systems.items()
            if name in STALL_NAMES and trials[0].stalls
        },
        "foreign_cores": {part: middle(cores) for part, cores in results.foreign_cores.items()},
        "flame_own_share": _top(results.flame.own) if results.flame else {},
        "flame_total_share": _top(_ours(results.flame.total)) if results.flame else {},
    }


def _placement(repeats: Sequence[PlacementTimes]) -> Figures:
    calls = sum(len(times.whole) for times in repeats)
    parts = {part: spread([times.parts[part] for times in repeats]) for part in repeats[0].parts}
    hits = sum(times.hits for times in repeats) / calls
    return {
        "whole": spread([times.whole for times in repeats]),
        **parts,
        "calls": calls,
        "hits": round(hits, 3),
    }


def _ways(repeats: Sequence[Delays]) -> Figures:
    return {
        "first": spread([ways.first for ways in repeats]),
        "later": spread([ways.later for ways in repeats]),
    }


def _load(trials: Sequence[LoadTrial]) -> Figures:
    names = ("tokens_per_second", "tokens_per_cpu_second", "cores", "tokens_per_message", "foreign_cores")
    ways = _ways([trial.ways for trial in trials])
    return ways | {name: middle(getattr(trial, name) for trial in trials) for name in names}


def throughput_shares(systems: Mapping[str, Sequence[LoadTrial]]) -> Figures:
    """Return our throughput divided by ours without TLS, pair by pair: in tokens/s, and in tokens/s per core."""
    return {
        other: {
            name: _shares_of(
                [
                    getattr(mine, name) / getattr(its, name)
                    for mine, its in zip(systems[OURS], systems[other], strict=True)
                ]
            )
            for name in ("tokens_per_second", "tokens_per_cpu_second")
        }
        for other in (PLAINTEXT, BEFORE)
        if other in systems
    }


def _shares_of(ratios: Sequence[float]) -> Figures:
    low, high = percentile(ratios, 0.25), percentile(ratios, 0.75)
    return {
        "median": round(median(ratios), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "pairs": len(ratios),
    }


def _stalls(trials: Sequence[LoadTrial]) -> Figures:
    return {
        phase: {
            "late": middle(trial.stalls[phase].late for trial in trials),
            "computing": middle(trial.stalls[phase].computing for trial in trials),
        }
        for phase in trials[0].stalls
    }


def _top(shares: Mapping[str, float]) -> dict[str, float]:
    return {frame: round(share, 3) for frame, share in list(shares.items())[:TOP_FRAMES]}


def _ours(shares: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of our own files, without `__main__`, which is in every stack."""
    return {
        frame: share
        for frame, share in shares.items()
        if ("(router/" in frame or "(proto/" in frame) and "__main__" not in frame
    }


STALL_NAMES = {OURS: "{}", OVER_HTTP.format(OURS): "{}, over HTTP"}
THROUGHPUTS = {"tokens_per_second": "tokens/s", "tokens_per_cpu_second": "tokens/s a core of the router"}
STALL_PHASES = {
    "streaming": "streams",
    "burst": "requests coming in one moment",
    "end": "streams cancelled in one moment",
}


def floors_of(figures: Figures) -> list[Floor]:
    whole = figures["placement_ms"]["whole"]
    floors = [
        Floor(name="placement path, median ms", value=whole["p50"], floor=PLACEMENT_FLOOR_MS, better="lower"),
    ]
    over_http = OVER_HTTP.format(OURS)
    for streams, systems in figures["streams"].items():
        if over_http in systems:
            name = f"tokens/s a core of the router over HTTP, {streams} streams, median"
            core = systems[over_http]["tokens_per_cpu_second"]["median"]
            floors.append(Floor(name=name, value=core, floor=CORE_FLOOR, better="higher"))
    if over_http in figures["request_cpu_ms"]:
        name = "CPU time of a request over HTTP, router and tokenizer, median ms"
        whole_ms = figures["request_cpu_ms"][over_http]["whole"]["median"]
        floors.append(Floor(name=name, value=whole_ms, floor=REQUEST_FLOOR_MS, better="lower"))
    for streams, others in figures["throughput_share"].items():
        for other, shares in others.items():
            for what, row in shares.items():
                name = f"{THROUGHPUTS[what]} of that of {other}, {streams} streams, median of the pairs"
                floors.append(Floor(name=name, value=row["median"], floor=THROUGHPUT_FLOOR, better="higher"))
    for streams, stalls in figures["longest_stall_ms"].items():
        for phase, of_what in STALL_PHASES.items():
            name = f"longest pause by the event loop's own computing, {streams} {of_what}, median of the repeats, ms"
            value = stalls[phase]["computing"]["median"]
            floors.append(Floor(name=name, value=value, floor=STALL_FLOOR_MS, better="lower"))
    return floors
