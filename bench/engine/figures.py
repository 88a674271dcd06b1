"""Figures and floors of the engine benchmark. Pure. Does not own their text (report.py) or plot (plot.py).

Ratios are of pairs: our system and another one in the same repeat, one right after the other. Pairs that other programs
disturbed are left out if enough pairs remain.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.engine.peers.protocol import Course
from bench.engine.systems import SERVED, SERVED_PLAINTEXT, Trial
from bench.reporting import Floor, percentile

UNDECIDED = 1.08
"""Ratios closer to 1 than this decide nothing: the machine drifts by 7 %."""
DISTURBING_CORES = 0.1
"""Cores used by other programs or virtual machines above which a trial is disturbed.

Threads that wait for one another lose more time than these cores take.
"""
MIN_PAIRS = 3
"""Minimum number of undisturbed pairs. With fewer, all pairs count."""
MIN_REPEATS = 3
"""Minimum number of repeats for a claim. With fewer, no goal is judged."""
UNSHARED = "blockyard, nothing shared"
ROOFLINE = "the roofline"
ROOFLINE_RATE = "roofline_tokens_per_second"
Figures = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Results:
    """Results of a run in one data type."""

    trials: dict[str, dict[str, list[Trial]]] = field(default_factory=dict)
    """Trials of each workload and system, repeat by repeat."""
    about: dict[str, Figures] = field(default_factory=dict)
    """Description and token counts of each workload."""
    systems: dict[str, Figures] = field(default_factory=dict)
    """Versions, notes and load time of each system, or why it is absent."""
    ours: tuple[str, ...] = ()
    """Our systems, including failed ones. Floors are for the first."""
    machine: Figures = field(default_factory=dict)
    """Rates of the machine, for rooflines."""
    kv_gib: float = 0.0
    """Size of each system's KV cache, or 0 if nothing was started."""
    is_cut_short: bool = False
    """Whether SIGTERM ended the run, so that later repeats and workloads are missing."""


def figures_of(runs: Mapping[str, Results], setting: Mapping[str, Any]) -> Figures:
    """Return the figures of a report. `runs` are by data type."""
    return {**setting, "runs": {dtype: _run(results) for dtype, results in runs.items()}}


def _run(results: Results) -> Figures:
    return {
        "ours": results.ours,
        "systems": results.systems,
        "machine": results.machine,
        "kv_gib": results.kv_gib,
        "workloads": {
            name: {
                **results.about[name],
                "systems": {system: _row(trials) for system, trials in rows.items()},
                "ratios": _ratios(rows, results.ours),
                "of_roofline": _of_roofline(rows, results.about[name].get(ROOFLINE_RATE)),
                "equal_first_tokens": _equal(rows, results.ours),
            }
            for name, rows in results.trials.items()
        },
    }


def tokens_per_second(trial: Trial) -> float:
    return sum(course.num_tokens for course in trial.courses) / trial.seconds


def _row(trials: Sequence[Trial]) -> Figures:
    courses = [course for trial in trials for course in trial.courses]
    return {
        "output_tokens_per_second": middle(tokens_per_second(trial) for trial in trials),
        "output_tokens_per_core_second": middle(tokens_per_second(trial) / trial.cores for trial in trials),
        "seconds": middle(trial.seconds for trial in trials),
        "first_token_ms": _shares(courses, _first),
        "token_ms": _shares([course for course in courses if course.num_tokens > 1], _between),
        "longest_pause_ms": _shares(courses, lambda course: course.longest_pause),
        "cores": middle(trial.cores for trial in trials),
        "foreign_cores": middle(trial.foreign_cores for trial in trials),
    }


def _first(course: Course) -> float:
    return (course.first or 0.0) - course.submitted


def _between(course: Course) -> float:
    return (course.last - (course.first or 0.0)) / (course.num_tokens - 1)


def _shares(courses: Sequence[Course], quantity: Callable[[Course], float]) -> Figures:
    values = [1000 * quantity(course) for course in courses]
    return {f"p{share}": round(percentile(values, share / 100), 1) for share in (50, 99) if values}


def middle(values: Iterable[float]) -> Figures:
    known = sorted(values)
    return {"median": round(median(known), 3), "lowest": round(known[0], 3), "highest": round(known[-1], 3)}


def _ratios(rows: Mapping[str, Sequence[Trial]], ours: Sequence[str]) -> Figures:
    """Return the ratios of output tokens/s of each of our systems to each other system, pair by pair."""
    return {
        our: {other: ratio_of(rows[our], rows[other]) for other in rows if other != our}
        for our in ours
        if our in rows
    }


def _of_roofline(rows: Mapping[str, Sequence[Trial]], limit: float | None) -> Figures:
    """Return each system's share of the roofline. Empty if the workload has no roofline."""
    if limit is None:
        return {}
    return {
        name: round(median(map(tokens_per_second, trials)) / limit, 4)
        for name, trials in rows.items()
        if trials
    }


def ratio_of(
    ours: Sequence[Trial], others: Sequence[Trial], rate: Callable[[Trial], float] = tokens_per_second
) -> Figures:
    """Return the ratio of rates over pairs of trials, without disturbed ones if enough remain."""
    pairs = list(zip(ours, others, strict=True))
    calm = [pair for pair in pairs if max(trial.foreign_cores for trial in pair) <= DISTURBING_CORES]
    counted = calm if len(calm) >= MIN_PAIRS else pairs
    ratios = middle(rate(mine) / rate(theirs) for mine, theirs in counted)
    return {**ratios, "pairs": len(pairs), "undisturbed": len(calm)}


def _equal(rows: Mapping[str, Sequence[Trial]], ours: Sequence[str]) -> Figures:
    """Return, for each system, the share of requests with the same first tokens as our first system that ran.

    If none of ours ran, the first peer takes its place.
    """
    first = next((name for name in (*ours, *rows) if name in rows), None)
    if first is None:
        return {}
    reference = [course.head for trial in rows[first] for course in trial.courses]
    return {
        system: round(
            sum(
                course.head == head
                for course, head in zip(
                    (course for trial in trials for course in trial.courses), reference, strict=True
                )
            )
            / len(reference),
            3,
        )
        for system, trials in rows.items()
    }


GOALS = (
    # Workload, our system ("" is the first), the other or all its variants ("name, variant"), minimum ratio, device.
    ("mixed", "", "openvino-genai", 1.0, "cpu"),
    ("mixed", "", "vllm", 1.1, "cpu"),
    ("mixed", "blockyard torch", "openvino-genai", 0.65, "cpu"),
    ("mixed", "blockyard cpu-int8", "blockyard cpu", 1.3, "cpu"),
    ("mixed", SERVED, SERVED_PLAINTEXT, 0.97, "cpu"),
    ("mixed", "blockyard, 2 ranks", "blockyard auto", 0.95, "cpu"),
    ("prefix", "", UNSHARED, 5.0, "cpu"),
    ("prefix", "", "vllm", 1.15, "cpu"),
    ("nano", "", "transformers, continuous", 4.0, "cuda"),
    ("nano", "", ROOFLINE, 0.5, "cuda"),
)


def floors_of(figures: Figures) -> list[Floor]:
    """Return the floors of all goals that can be judged."""
    return [
        Floor(name=name, value=ratio, floor=floor, better="higher")
        for name, ratio, floor in _goals(figures)
        if ratio is not None
    ]


def not_judged(figures: Figures) -> list[str]:
    """Return the goals of this device for which a workload, a system or repeats are missing."""
    return [f"{name}, at least {floor:g}" for name, ratio, floor in _goals(figures) if ratio is None]


def _goals(figures: Figures) -> Iterator[tuple[str, float | None, float]]:
    """Yield the name of each goal, its ratio if there is one, and the minimum ratio.

    Yields nothing if our cache is in 8 bits, because the peers of the goals have caches in the model's data type.
    """
    if figures.get("kv_cache_dtype", "auto") != "auto":
        return
    for dtype, run in figures["runs"].items():
        for workload, named, other, floor, device in GOALS:
            our = named or run["ours"][0]
            measured = run["workloads"].get(workload, {})
            ratios = dict(measured.get("ratios", {}).get(our, {}))
            if our in (shares := measured.get("of_roofline", {})):
                ratios[ROOFLINE] = {"median": shares[our]}
            variants = [name for name in ratios if name == other or name.startswith(f"{other},")]
            if device == figures["device"]:
                for name in variants or [other]:
                    ratio = ratios[name]["median"] if variants and figures["repeats"] >= MIN_REPEATS else None
                    of = "median" if name == ROOFLINE else "median pair"
                    yield f"{workload}, {dtype}: {our} / {name}, {of}", ratio, floor
