"""Sweep of each placement setting, one at a time, on loads of the study. It shows how each default was chosen.

    python -m bench.placement.sweep

Runs in virtual time and takes some minutes on two cores. Every value of a setting gets the same arrivals; the other
settings keep their defaults. The criteria are mean time to first token, median latency, and the worst balance. Times
are ratios to the default, as a geometric mean over the loads. Below 1 is better.
"""

import argparse
import math
import os
from collections.abc import Iterable
from dataclasses import replace

from blockyard.router.placement.config import PlacementConfig, PolicyName

from bench.placement.simulation.simulator import Setup
from bench.placement.simulation.study import Job, Load, Table, run_table
from bench.reporting import write_report

LOADS = (
    Load(workload="shared-prefix", rate=25, seconds=4),
    Load(workload="uniform-groups", rate=20, seconds=6, num_workers=4),
    Load(workload="multi-turn", rate=4, seconds=5),
    # Overload: requests wait in the router's lines.
    Load(workload="long-prompts", rate=8, seconds=12),
)
"""About 100 requests each: the real router and worker cost some 50 µs a token."""
VALUES: dict[str, tuple[float, ...]] = {
    "others_fraction": (0.0, 0.3),
    "later_fraction": (0.0, 0.1, 0.4),
    "context_fraction": (0.0, 0.2),
    "decode_step_fraction": (0.0, 4.0),
    "near_equal_ms": (0.0, 20.0),
    "near_equal_fraction": (0.0, 0.1),
    "max_unstarted": (4, 128),
    "reconsider_seconds": (0.1, 1.0),
    "loaded_ms": (50.0, 1000.0),
    "dynamo_overlap_score_weight": (0.5, 2.0, 5.0),
    "dynamo_temperature": (0.5,),
}
"""Values by field of PlacementConfig.

Left out are the prices of memory, which no load here fills, and the grace of a speculative prefix. Also left out are
the rates assumed before the first measurement, because workers measure theirs first.
"""
POLICIES: dict[str, PolicyName] = {
    "loaded_ms": "session",
    "dynamo_overlap_score_weight": "dynamo",
    "dynamo_temperature": "dynamo",
}
"""Policies for the fields that `prefix` does not read."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement.sweep")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--field", action="append", choices=VALUES, help="only these; writes no report")
    options = parser.parse_args()
    chosen = options.field or list(VALUES)
    table = run_table(list(_jobs(chosen, options.seeds)), processes=options.processes)
    text = _text(table, chosen, options.seeds)
    print(text)
    if not options.field:
        write_report(
            "placement-sweep",
            title="Placement: how each default was chosen",
            text=text,
            figures={"cells": table.as_dict()},
            floors=[],
            versions={},
        )


def _jobs(chosen: Iterable[str], num_seeds: int) -> Iterable[Job]:
    """Yield all jobs. Fields of one policy share the runs with its defaults."""
    tags = {
        _tag(name, value): (policy, replace(PlacementConfig(), **{name: value}))  # type: ignore[arg-type]
        for name in chosen
        for policy in [_policy(name)]
        for value in _values(name)
    }
    for tag, (policy, placement) in tags.items():
        for load in LOADS:
            for seed in range(num_seeds):
                yield Job(load=load, setup=Setup(policy=policy, seed=seed, placement=placement), tag=tag)


def _policy(name: str) -> PolicyName:
    return POLICIES.get(name, "prefix")


def _values(name: str) -> list[float]:
    """Return the values of a field, including its default."""
    return sorted({*VALUES[name], _default(name)})


def _default(name: str) -> float:
    value: float = getattr(PlacementConfig(), name)
    return value


def _tag(name: str, value: float) -> str:
    return f"{_policy(name)} by default" if value == _default(name) else f"{name}={value:g}"


def _text(table: Table, chosen: Iterable[str], num_seeds: int) -> str:
    loads = ", ".join(load.label for load in LOADS)
    parts = [
        f"Command: `python -m bench.placement.sweep --seeds {num_seeds}`. The first columns are ratios to the default "
        f"(bold), as geometric means over {loads} workers. Below 1 is better, except for reuse. The last two columns "
        "show the worst load: the largest share of the uniform groups on one worker, and the share of seconds with an "
        "idle worker beside a crowded one. Each load has about 100 requests, so differences of a few per cent "
        "are chance."
    ]
    for name in chosen:
        lines = [
            f"## {name} ({_policy(name)})",
            "",
            "| value | mean TTFT | p99 TTFT | median latency | token gap | reuse | largest share | idle |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_row(table, name, value) for value in _values(name)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(table: Table, name: str, value: float) -> str:
    tag, base = _tag(name, value), _tag(name, _default(name))
    ratios = [
        _ratio(table, tag, base, figure)
        for figure in ("ttft_mean", "ttft_p99", "latency_p50", "token_gap_mean")
    ]
    reuse = _ratio(table, tag, base, "reuse")
    uniform = next(load.label for load in LOADS if load.workload == "uniform-groups")
    share = table.mean(uniform, tag, "largest_share")
    idle = max(table.mean(load.label, tag, "idle_beside_crowded") for load in LOADS)
    shown = f"**{value:g}**" if value == _default(name) else f"{value:g}"
    cells = [*(f"{ratio:.3f}" for ratio in ratios), f"{reuse:.3f}", f"{share:.3f}", f"{idle:.3f}"]
    return f"| {shown} | " + " | ".join(cells) + " |"


def _ratio(table: Table, tag: str, base: str, figure: str) -> float:
    """Return the geometric mean of the ratios over the loads for which the figure is above 0."""
    pairs = [(table.mean(load.label, tag, figure), table.mean(load.label, base, figure)) for load in LOADS]
    logs = [math.log(value / default) for value, default in pairs if value > 0 and default > 0]
    return math.exp(sum(logs) / len(logs))


if __name__ == "__main__":
    main()
