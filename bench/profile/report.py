"""Report of the profile: its text and its floors. Pure. Does not own the figures (scenarios.py, __main__.py)."""

from typing import Any

from bench.reporting import Floor

MANY = 256
"""Number of running sequences at which the scheduler's cost has a floor."""
PLAN_FLOOR_MS = 1.0
NAMES_FLOOR = 0.01
COLLECTION_FLOOR_MS = 5.0
STEP_FLOOR = 0.8
STEP_MODEL = "llama-3.1-8b"
"""Model for which whole decode steps have a floor, on a GPU. For other models they are only figures."""
STEP_SEQUENCES = 32
"""Minimum number of sequences in a step that counts for this floor."""
WALKED = "python's own way"
"""Label of runs in which Python's garbage collector visits all objects, because none are frozen."""
Figures = dict[str, Any]


def floors_of(figures: Figures) -> list[Floor]:
    """Return the floors of what was measured. A run that is cut short, or short of memory, has fewer."""
    rows: list[tuple[str, float, float]] = []
    if "plan_and_prepare_ms" in figures:
        p50 = figures["plan_and_prepare_ms"]["p50"]
        rows.append((f"plan + prepare, {MANY} running, median ms", p50, PLAN_FLOOR_MS))
    if "names" in figures:
        share = figures["names"]["share"]
        rows.append(("naming and look-up at 0 % hits, share of the time", share, NAMES_FLOOR))
    if "full_collections" in figures:
        longest = max(
            figures["collections"]["spared"]["longest_ms"],
            figures["full_collections"]["spared_ms"],
            figures["full_collections"]["large_pool_ms"],
        )
        rows.append(("longest garbage collection, as in a worker, ms", longest, COLLECTION_FLOOR_MS))
    floors = [Floor(name=name, value=value, floor=floor, better="lower") for name, value, floor in rows]
    return [*floors, *_step_floors(figures)]


def _step_floors(figures: Figures) -> list[Floor]:
    """Return a floor for each context length of STEP_MODEL on a GPU. Other models and a CPU have none."""
    if figures["device"] != "cuda" or figures["model"] != STEP_MODEL:
        return []
    shares: dict[int, list[float]] = {}
    for row in figures["of_roofline"]:
        if row["sequences"] >= STEP_SEQUENCES:
            shares.setdefault(row["context"], []).append(row["share"])
    return [
        Floor(
            name=f"whole decode step of {STEP_MODEL}, {STEP_SEQUENCES} and more sequences of {context} tokens, "
            "least of the roofline",
            value=min(values),
            floor=STEP_FLOOR,
            better="higher",
        )
        for context, values in shares.items()
    ]


def text_of(figures: Figures, about: str) -> str:
    """Format the report. `about` is the command's docstring, of which the title and the examples are cut off."""
    cut_short = " **Cut short: later measurements are missing.**" if figures.get("cut_short") else ""
    left_out = figures.get("left_out")
    return "\n\n".join(
        [
            about.partition("\n\n")[2].partition("\n\n")[2].strip(),
            f"Model {figures['model']}, {figures['dtype']}, kernel backend {figures['backend']}, {figures['threads']} "
            f"threads. Proven before: {figures['proven']}.{cut_short}",
            *([f"Left out for lack of memory: {'; '.join(left_out)}."] if left_out else []),
            _roofline_table(figures["of_roofline"]),
            *(_table(name, rows) for name, rows in figures["steps"].items()),
            *_scheduler(figures),
            *_garbage_collection(figures),
        ]
    )


def _scheduler(figures: Figures) -> list[str]:
    parts: list[str] = []
    if "plan_and_prepare_ms" in figures:
        plan = figures["plan_and_prepare_ms"]
        parts.append(
            f"plan + prepare at {MANY} running sequences, {plan['steps']} steps: p50 {plan['p50']} ms, "
            f"p99 {plan['p99']} ms, max {plan['p100']} ms."
        )
    if "names" in figures:
        names = figures["names"]
        parts.append(
            f"`mixed` at 0 % hits took {names['whole_ms']:,} ms. Naming took {names['naming_ms']} ms and look-up "
            f"{names['look_up_ms']} ms of it: {names['share']:.2%}."
        )
    return [f"## Scheduler\n\n{' '.join(parts)}"] if parts else []


def _garbage_collection(figures: Figures) -> list[str]:
    if "full_collections" not in figures:
        return []
    collections = [
        f"- {way}: {row['count']} collections, longest {row['longest_ms']} ms, sum {row['whole_ms']} ms"
        for way, row in figures["collections"].items()
    ]
    return ["\n".join(["## Garbage collection, wall clock", "", *collections, _full_collections(figures)])]


def _full_collections(figures: Figures) -> str:
    full = figures["full_collections"]
    return (
        f"- a full collection while {MANY} sequences decode, longest of {full['count']}: as in a worker "
        f"{full['spared_ms']} ms, {WALKED} {full['unspared_ms']} ms\n"
        f"- the same with {full['large_pool_tokens']:,} tokens in the pool and a simulated model: as in a worker "
        f"{full['large_pool_ms']} ms"
    )


def _roofline_table(rows: list[Figures]) -> str:
    lines = [
        f"| {row['sequences']} | {row['context']:,} | {row['step_ms']:.2f} | {row['limit_ms']:.2f} "
        f"| {row['share']:.0%} |"
        for row in rows
    ]
    head = "| sequences | tokens of each | step, median ms | limit ms | limit / step |\n|---|---|---|---|---|"
    return "\n".join(
        [
            "## Whole decode steps, without measured parts",
            "",
            "The limit is max(weight bytes / copy bandwidth, FLOPs of the weights / matmul rate) + KV bytes / copy "
            "bandwidth, with the rates of this run.",
            "",
            head,
            *lines,
        ]
    )


def _table(name: str, rows: dict[str, float]) -> str:
    whole = rows["step"]
    lines = [f"| {part} | {value:.3f} | {value / whole:.1%} |" for part, value in rows.items() if value]
    return "\n".join(
        [
            f"## {name[0].upper()}{name[1:]}",
            "",
            "| part | ms, median | share of a step |",
            "|---|---|---|",
            *lines,
        ]
    )
