"""What the engine benchmark found, as figures and floors. Pure. Does not own their text (report.py) or look (plot.py).

Ratios are of pairs: ours and another system in the same repeat, one right after the other. Pairs that something else
disturbed are left out where enough others remain.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.engine.peers.protocol import Course
from bench.engine.systems import SERVED, SERVED_PLAINTEXT, Trial
from bench.reporting import Floor, percentile

UNDECIDED = 1.08
"""Ratios nearer to 1 than this are the machine's: it drifts by 7 %."""
DISTURBING_CORES = 0.1
"""Of other programs or other virtual machines: threads that wait for one another lose more than those take."""
MIN_PAIRS = 3
"""Undisturbed ones; where there are fewer, all pairs count."""
MIN_REPEATS = 3
"""Of a report that anything may be claimed by: of fewer no goal is judged."""
UNSHARED = "blockyard, nothing shared"
ROOFLINE = "the roofline"
ROOFLINE_RATE = "roofline_tokens_per_second"
Figures = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Results:
    """Of each workload and system, its trials repeat by repeat."""

    trials: dict[str, dict[str, list[Trial]]] = field(default_factory=dict)
    about: dict[str, Figures] = field(default_factory=dict)
    """Of each workload: what it is, and how many tokens."""
    systems: dict[str, Figures] = field(default_factory=dict)
    """Versions, notes and load time, or why it is absent."""
    ours: tuple[str, ...] = ()
    """The first is the one that floors are of; one that failed is among them."""
    machine: Figures = field(default_factory=dict)
    """The rates that rooflines are of."""


def figures_of(runs: Mapping[str, Results], setting: Mapping[str, Any]) -> Figures:
    """`runs` by data type."""
    return {**setting, "runs": {dtype: _run(results) for dtype, results in runs.items()}}


def _run(results: Results) -> Figures:
    return {
        "ours": results.ours,
        "systems": results.systems,
        "machine": results.machine,
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
    """Output tokens/s of each of our rows over each other row, pair by pair."""
    return {
        our: {other: _ratio(rows[our], rows[other]) for other in rows if other != our}
        for our in ours
        if our in rows
    }


def _of_roofline(rows: Mapping[str, Sequence[Trial]], limit: float | None) -> Figures:
    """Of each system; nothing where the workload has no roofline."""
    if limit is None:
        return {}
    return {
        name: round(median(map(tokens_per_second, trials)) / limit, 4)
        for name, trials in rows.items()
        if trials
    }


def _ratio(ours: Sequence[Trial], others: Sequence[Trial]) -> Figures:
    pairs = list(zip(ours, others, strict=True))
    calm = [pair for pair in pairs if max(trial.foreign_cores for trial in pair) <= DISTURBING_CORES]
    counted = calm if len(calm) >= MIN_PAIRS else pairs
    ratios = middle(tokens_per_second(mine) / tokens_per_second(theirs) for mine, theirs in counted)
    return {**ratios, "pairs": len(pairs), "undisturbed": len(calm)}


def _equal(rows: Mapping[str, Sequence[Trial]], ours: Sequence[str]) -> Figures:
    """Of each system, for how many requests its first tokens are those of the first of our rows that there is."""
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
    # Workload, our row ("" is the first), the other or all its variants ("name, variant"), at least, on which device.
    ("mixed", "", "openvino-genai", 1.0, "cpu"),
    ("mixed", "", "vllm", 1.1, "cpu"),
    ("mixed", "blockyard torch", "openvino-genai", 0.65, "cpu"),
    ("mixed", "blockyard cpu-int8", "blockyard cpu", 1.3, "cpu"),
    ("mixed", SERVED, SERVED_PLAINTEXT, 0.97, "cpu"),
    ("prefix", "", UNSHARED, 5.0, "cpu"),
    ("prefix", "", "vllm", 1.15, "cpu"),
    ("nano", "", "transformers, continuous", 4.0, "cuda"),
    ("nano", "", ROOFLINE, 0.5, "cuda"),
)


def floors_of(figures: Figures) -> list[Floor]:
    """Of what was there to be compared."""
    return [
        Floor(name=name, value=ratio, floor=floor, better="higher")
        for name, ratio, floor in _goals(figures)
        if ratio is not None
    ]


def not_judged(figures: Figures) -> list[str]:
    """The goals of this device whose workload, systems or repeats were not there."""
    return [f"{name}, at least {floor:g}" for name, ratio, floor in _goals(figures) if ratio is None]


def _goals(figures: Figures) -> Iterator[tuple[str, float | None, float]]:
    """What is compared, the ratio if there is one, and what it must be. Nothing where our cache is in 8 bits: the goals
    are beside peers whose is as exact as the model."""
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
