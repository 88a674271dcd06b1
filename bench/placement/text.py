"""Text, tables and floors of the placement report. Does not own the runs (__main__.py)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import fmean, stdev
from typing import Any, Literal, get_args

from blockyard.router.placement.config import PolicyName

from bench.placement.simulation.profile import HardwareProfile
from bench.placement.simulation.study import Load, Table
from bench.reporting import Floor

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
SHOWN = {
    "reuse": ("reuse", 1, "{:.3f}"),
    "ttft_mean": ("TTFT mean, ms", 1000, "{:.0f}"),
    "ttft_p99": ("TTFT p99, ms", 1000, "{:.0f}"),
    "token_gap_mean": ("token gap, ms", 1000, "{:.1f}"),
    "latency_p50": ("latency p50, s", 1, "{:.2f}"),
    "largest_share": ("largest share", 1, "{:.3f}"),
    "idle_beside_crowded": ("idle beside crowded", 1, "{:.3f}"),
}
"""Heading, factor and format of each figure."""
MOCK_TAG = "mock engine, {}"
"""Tag of runs with the engine that Dynamo's simulator assumes."""


UNIFORM_TAG = "uniform speeds"
"""Tag of `prefix` with routers that take all workers to be equally fast."""
RIVALS: dict[str, PolicyName] = {
    "prefix": "prefix",
    UNIFORM_TAG: "prefix",
    "dynamo": "dynamo",
    "least_loaded": "least_loaded",
}
"""Policy by tag, on the loads where `prefix` must not be behind."""
LEAST_MARGIN = 0.005
"""Part of a figure by which `prefix` may always be behind a rival."""
MOST_MARGINS = {"reuse": 0.03, "ttft_mean": 0.03, "ttft_p99": 0.1}
"""Largest part by which `prefix` may be behind a rival. Between the two, the spread of the seeds decides."""
RIVAL_TEXT = (
    f"`dynamo` is Dynamo's published cost function in our placer. `{UNIFORM_TAG}` is `prefix` with routers that take "
    "all workers to be equally fast. A floor beside a rival is the mean of the seeds' ratios. It allows one standard "
    f"deviation of them, at least {100 * LEAST_MARGIN:g} % and at most "
    + ", ".join(f"{100 * margin:g} % of {figure}" for figure, margin in MOST_MARGINS.items())
    + "."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Loads of the study and their results."""

    loads: Sequence[Load]
    large_loads: Sequence[Load]
    """Loads of large clusters, with `prefix` alone."""
    router_loads: Sequence[Load]
    many_routers: str
    """Tag of runs with several routers."""
    table: Table
    peer_loads: Sequence[Load]
    peer: dict[str, Any]
    """Reuse by Dynamo's own simulator, by label of the load. Empty if it was not run."""


def floors(findings: Findings) -> list[Floor]:
    table = findings.table
    found = []
    for load in findings.peer_loads:
        ours = table.mean(load.label, MOCK_TAG.format("prefix"), "reuse")
        theirs = findings.peer[load.label]["kv"]["mean"]
        found.append(_floor(f"reuse beside Dynamo's simulator, {load.label}", ours / theirs, 1.0, "higher"))
    found += rival_floors(table, findings.loads)
    for load in findings.loads:
        if load.workload in ("nothing-shared", "long-prompts"):
            for figure in ("ttft_mean", "latency_p50"):
                ratio = _ratio(table, load, "least_loaded", figure)
                found.append(_floor(f"{figure} beside least_loaded, {load.label}", ratio, 1.02, "lower"))
    uniform = next(load.label for load in findings.loads if load.workload == "uniform-groups")
    share = table.mean(uniform, "prefix", "largest_share")
    ideal = table.mean(uniform, "prefix", "reuse") / table.mean(uniform, "prefix", "ideal_reuse")
    idle = max(table.mean(load.label, "prefix", "idle_beside_crowded") for load in findings.loads)
    return [
        *found,
        _floor(f"largest share of a worker, {uniform}", share, 0.30, "lower"),
        _floor(f"reuse over the ideal, {uniform}", ideal, 0.95, "higher"),
        _floor("share of seconds with one worker idle beside a crowded one, worst load", idle, 0.0, "lower"),
    ]


def text(findings: Findings) -> str:
    profile, table = HardwareProfile(), findings.table
    parts = [
        "Time is virtual, so other load on the machine changes nothing. Each worker is "
        f"{profile.name} by a roofline, with {profile.num_blocks:,} blocks of {profile.block_size} tokens. Routers "
        "and workers are real, from the placer to the engine, on the index's twin. Times are those of simulated GPUs, "
        "so only their order and ratios count.",
        f"Numbers are means over the seeds. Policies other than {', '.join(RIVALS)} have the first seed alone. "
        f"{RIVAL_TEXT}",
        f"![reuse and time to first token]({date.today().isoformat()}-placement.png)",
        *(_policy_table(load, table) for load in findings.loads),
        _router_table(findings),
        _peer_table(findings) if findings.peer else "Dynamo's own simulator was not run (`--dynamo-python`).",
        *(_policy_table(load, table) for load in findings.large_loads),
    ]
    if not any(load.trace for load in findings.large_loads):
        parts.append("No production trace was given (`--trace`).")
    return "\n\n".join(parts)


def _policy_table(load: Load, table: Table) -> str:
    tags = [tag for tag in dict.fromkeys((*RIVALS, *POLICIES)) if (load.label, tag) in table.cells]
    runs = list(table.cells[load.label, tags[0]].values())
    seeds = "1 run" if len(runs) == 1 else f"{len(runs)} seeds"
    return "\n".join(
        [
            f"## {load.label} workers",
            "",
            f"{seeds}, {runs[0].num_requests} requests in the first, ideal reuse "
            f"{table.mean(load.label, tags[0], 'ideal_reuse'):.3f}.",
            "",
            *heading("policy"),
            *(f"| {tag} | {cells(load.label, tag, table)} |" for tag in tags),
        ]
    )


def heading(*first: str) -> Iterable[str]:
    headings = [*first, *(heading for heading, _, _ in SHOWN.values())]
    return ("| " + " | ".join(headings) + " |", "|---" * len(headings) + "|")


def cells(load: str, tag: str, table: Table) -> str:
    return " | ".join(
        form.format(factor * table.mean(load, tag, figure)) for figure, (_, factor, form) in SHOWN.items()
    )


def _router_table(findings: Findings) -> str:
    rows = [
        f"| {load.label} | {name} | {cells(load.label, tag, findings.table)} |"
        for load in findings.router_loads
        for name, tag in (("1 router", "prefix"), (findings.many_routers, findings.many_routers))
    ]
    title = "## Several routers that share only the index and the workers' reports"
    return "\n".join([title, "", *heading("load", "routers"), *rows])


def _peer_table(findings: Findings) -> str:
    lines = [
        "## Beside Dynamo's own simulator, on the same arrivals",
        "",
        f"ai-dynamo-runtime {findings.peer['version']}, workers with 25,000 blocks of 16, speedup_ratio 0.5. Ours have "
        "the step times that it assumes (simulation/mocker.py). At 10/s on 4 workers both are overloaded, and requests "
        "wait for tens of seconds. The table shows reuse at first admission, which ours counts:",
        "",
        "| load | its kv router | with re-admissions | its round robin | our prefix | our dynamo | ideal |",
        "|---|---|---|---|---|---|---|",
    ]
    for load in findings.peer_loads:
        theirs = findings.peer[load.label]
        ours = [
            findings.table.mean(load.label, MOCK_TAG.format(policy), "reuse")
            for policy in ("prefix", "dynamo")
        ]
        ideal = findings.table.mean(load.label, MOCK_TAG.format("prefix"), "ideal_reuse")
        peer = [theirs["kv"]["mean"], theirs["kv"]["with_readmissions"], theirs["round_robin"]["mean"]]
        cells = [*peer, *ours, ideal]
        lines.append(f"| {load.label} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    return "\n".join(lines)


def _ratio(table: Table, load: Load, policy: str, figure: str) -> float:
    return table.mean(load.label, "prefix", figure) / table.mean(load.label, policy, figure)


def rival_floors(table: Table, loads: Iterable[Load]) -> list[Floor]:
    return [
        rival_floor(table, load, rival, figure)
        for load in loads
        for rival in RIVALS
        if rival != "prefix"
        for figure in MOST_MARGINS
        if figure != "reuse" or table.mean(load.label, rival, figure)
    ]


def rival_floor(table: Table, load: Load, rival: str, figure: str, *, ours: str = "prefix") -> Floor:
    """Return the floor of a figure of `ours` over that of a rival. It allows the spread of the seeds."""
    ratios = table.ratios(load.label, ours, rival, figure)
    spread = stdev(ratios) if len(ratios) > 1 else 0.0
    margin = min(max(spread, LEAST_MARGIN), MOST_MARGINS[figure])
    better: Literal["higher", "lower"] = "higher" if figure == "reuse" else "lower"
    bound = 1 - margin if better == "higher" else 1 + margin
    of = figure if ours == "prefix" else f"{figure} of {ours}"
    return _floor(f"{of} beside {rival}, {load.label}", fmean(ratios), bound, better)


def _floor(name: str, value: float, floor: float, better: Literal["higher", "lower"]) -> Floor:
    return Floor(name=name, value=value, floor=floor, better=better)
