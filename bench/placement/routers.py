"""Several routers and a late index, beside one router with an index in time, in virtual time.

    python -m bench.placement.routers --trace conversation.jsonl

Every cell gets the same arrivals. Ratios are to one router without lag, per load: reuse, where above 1 is better, and
mean time to first token, where below 1 is better. Takes about an hour on two cores; `--quick` has the corners of the
matrix with one seed, and writes no report. With `--keep FOLDER` it goes on where it was ended.
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.placement.simulation.simulator import Setup
from bench.placement.simulation.study import Job, Load, Table, run_table
from bench.reporting import Floor, write_report

LOADS = (
    Load(workload="burst", rate=500, seconds=1),
    Load(workload="shared-prefix", rate=20, seconds=10),
    Load(workload="agents", rate=1.5, seconds=10),
)
NUM_ROUTERS = (1, 2, 4, 8)
LAGS_SECONDS = (0.0, 1.0, 5.0)
CELLS = tuple((num_routers, lag) for num_routers in NUM_ROUTERS for lag in LAGS_SECONDS)
CORNERS = ((1, 0.0), (1, 5.0), (8, 0.0), (8, 5.0))
LEAST_REUSE = 0.97
MOST_TTFT = 1.03


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement.routers")
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format, of which 30 s are played")
    parser.add_argument("--trace-speed", type=float, default=4.0, help="default %(default)g")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--keep", type=Path, help="a folder for the result of each run, as of bench.placement"
    )
    parser.add_argument("--quick", action="store_true", help="the corners of the matrix, one seed, no report")
    options = parser.parse_args()
    loads: tuple[Load, ...] = LOADS
    if options.trace is not None:
        trace = Load(workload="trace", rate=options.trace_speed, seconds=30, trace=str(options.trace))
        loads = (*loads, trace)
    cells, seeds = (CORNERS, 1) if options.quick else (CELLS, options.seeds)
    table = run_table(list(_jobs(loads, cells, seeds)), processes=options.processes, keep=options.keep)
    text = _text(table, loads, cells, seeds)
    print(text)
    if not options.quick:
        write_report(
            "placement-routers",
            title="Placement: several routers and a late index beside one router",
            text=text,
            figures={"cells": table.as_dict()},
            floors=list(_floors(table, loads, cells)),
            versions={},
        )


def _jobs(loads: Iterable[Load], cells: Sequence[tuple[int, float]], num_seeds: int) -> Iterator[Job]:
    for load in loads:
        for num_routers, lag_seconds in cells:
            for seed in range(num_seeds):
                setup = Setup(seed=seed, num_routers=num_routers, index_lag_seconds=lag_seconds)
                yield Job(load=load, setup=setup, tag=_tag(num_routers, lag_seconds))


def _tag(num_routers: int, lag_seconds: float) -> str:
    return f"{num_routers} router{'s' * (num_routers > 1)}, {lag_seconds:g} s"


BASE = _tag(1, 0.0)


def _ratio(table: Table, load: Load, tag: str, figure: str) -> float:
    return table.mean(load.label, tag, figure) / table.mean(load.label, BASE, figure)


def _text(table: Table, loads: Sequence[Load], cells: Sequence[tuple[int, float]], num_seeds: int) -> str:
    parts = [
        f"Seeds: {num_seeds}, eight workers, H200 with Qwen3-8B by a roofline. The tag is the number of routers and "
        "the time until look-ups see what a worker has published. Ratios are to one router without lag."
    ]
    for load in loads:
        ideal = table.mean(load.label, BASE, "ideal_reuse")
        lines = [
            f"## {load.label} workers",
            "",
            f"Ideal reuse {ideal:.3f}.",
            "",
            "| routers, lag | reuse | ratio | TTFT mean, ms | ratio | TTFT p99, ms | ratio |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_row(table, load, _tag(*cell)) for cell in cells]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(table: Table, load: Load, tag: str) -> str:
    cells = [
        f"{factor * table.mean(load.label, tag, figure):{form}} | {_ratio(table, load, tag, figure):.3f}"
        for figure, factor, form in (
            ("reuse", 1, ".3f"),
            ("ttft_mean", 1000, ".0f"),
            ("ttft_p99", 1000, ".0f"),
        )
    ]
    return f"| {tag} | " + " | ".join(cells) + " |"


def _floors(table: Table, loads: Sequence[Load], cells: Sequence[tuple[int, float]]) -> Iterator[Floor]:
    tags = [_tag(*cell) for cell in cells]
    for load in loads:
        reuse = min(_ratio(table, load, tag, "reuse") for tag in tags)
        yield Floor(name=f"least reuse ratio, {load.label}", value=reuse, floor=LEAST_REUSE, better="higher")
        first = max(_ratio(table, load, tag, "ttft_mean") for tag in tags)
        yield Floor(name=f"most mean TTFT ratio, {load.label}", value=first, floor=MOST_TTFT, better="lower")


if __name__ == "__main__":
    main()
