"""Placement with pulls beside routing alone and a pooled cache, in virtual time.

    python -m bench.placement.pulls --trace conversation.jsonl

Four loads have the shapes that llm-d publishes for its peer pulls, at a smaller scale. The others are parts of a
production trace, shared prefixes, agents with pauses, and prompts that share nothing. Every arm gets the same arrivals
and the same memory. `--keep FOLDER` goes on where it was ended.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.placement.simulation.profile import HardwareProfile
from bench.placement.simulation.simulator import Setup
from bench.placement.simulation.study import Job, Load, Table, run_table
from bench.placement.text import rival_floor
from bench.reporting import Floor, write_report

SHAPES = (
    Load(workload="uniform-pool", rate=12, seconds=15),
    Load(workload="hot-set", rate=16, seconds=12),
    Load(workload="document-questions", rate=3, seconds=10),
    Load(workload="document-questions", rate=3, seconds=10, num_joiners=4, join_seconds=5.0),
)
"""llm-d's uniform pool, hot set, document questions, and a fleet of which half is cold.

Source: guides/p2p-kv-cache-sharing of llm-d/llm-d at 01cac34c. There, 16 pods serve prefixes of 48,000 tokens. Here, 8
workers serve prefixes of 24,000.
"""
NOTHING_SHARED = Load(workload="nothing-shared", rate=30, seconds=8)
OTHERS = (
    Load(workload="shared-prefix", rate=20, seconds=10),
    Load(workload="pausing-agents", rate=3, seconds=10),
    NOTHING_SHARED,
)
GIB = 2**30
TCP = replace(HardwareProfile(), host_cache_bytes=64.0 * GIB)
RDMA = replace(TCP, link_bytes_per_second=40e9)
POOLED = replace(TCP, link_bytes_per_second=1e15, link_setup_seconds=1e-6, host_bytes_per_second=1e15)
"""Every worker reads the blocks of all others at no cost, as from one cache of the same size."""
ROUTING = "routing alone"
PULLS, FAST_PULLS = "pulls, 4 GB/s", "pulls, 40 GB/s"
ARMS = {
    ROUTING: Setup(profile=TCP),
    PULLS: Setup(profile=TCP, pulls=True),
    FAST_PULLS: Setup(profile=RDMA, pulls=True),
    "one pooled cache": Setup(profile=POOLED, pulls=True),
}
COLUMNS = {
    "reuse": ("reuse", 1, ".3f"),
    "pulled": ("pulled", 1, ".3f"),
    "ttft_mean": ("TTFT mean, ms", 1000, ".0f"),
    "ttft_p99": ("TTFT p99, ms", 1000, ".0f"),
    "token_gap_mean": ("token gap, ms", 1000, ".1f"),
    "largest_share": ("largest share", 1, ".3f"),
}
"""Heading, factor and format of each figure."""
MOST_WITH_NOTHING_SHARED = 1.01


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement.pulls")
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format, played four times as fast")
    parser.add_argument("--trace-seconds", type=float, default=60.0, help="of each part; default %(default)g")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--keep", type=Path, help="a folder for the result of each run, as of bench.placement"
    )
    options = parser.parse_args()
    loads = [*SHAPES, *OTHERS]
    if options.trace is not None:
        trace = Load(workload="trace", rate=4, seconds=options.trace_seconds, trace=str(options.trace))
        loads.insert(0, trace)
    jobs = [
        Job(load=load, setup=replace(setup, seed=seed), tag=tag)
        for seed in range(options.seeds)
        for load in loads
        for tag, setup in _arms(load).items()
    ]
    table = run_table(jobs, processes=options.processes, keep=options.keep)
    path = write_report(
        "placement-pulls",
        title="Placement with pulls beside routing alone and a pooled cache",
        text=_text(table, loads, options.seeds),
        figures={"profile": TCP.as_dict(), "cells": table.as_dict()},
        floors=list(_floors(table, loads)),
        versions={},
    )
    print(path.read_text(encoding="utf-8"))


def _arms(load: Load) -> dict[str, Setup]:
    """Return the arms by tag. Where nothing is shared, only whether pulls cost anything is to be seen."""
    return {tag: ARMS[tag] for tag in (ROUTING, PULLS)} if load is NOTHING_SHARED else ARMS


def _text(table: Table, loads: Sequence[Load], num_seeds: int) -> str:
    parts = [
        f"Seeds: {num_seeds}, time is virtual, workers are {TCP.name} by a roofline, with "
        f"{TCP.host_cache_bytes / GIB:g} GiB of host memory for blocks. All start without cached blocks. "
        "`routing alone` never pulls. `one pooled cache` has pulls that take no time. It is no strict bound: "
        "each request is placed for itself. "
        "Ideal reuse is that of one unlimited cache. A floor is the mean of the seeds' ratios to routing alone. It "
        "allows one standard deviation of them, at most 3 % of a mean and 10 % of a p99."
    ]
    for load in loads:
        run = next(iter(table.cells[load.label, ROUTING].values()))
        headings = [heading for heading, _, _ in COLUMNS.values()]
        lines = [
            f"## {load.label} workers",
            "",
            f"{run.num_requests} requests in the first seed, ideal reuse "
            f"{table.mean(load.label, ROUTING, 'ideal_reuse'):.3f}.",
            "",
            "| arm | " + " | ".join(headings) + " |",
            "|---" * (1 + len(headings)) + "|",
            *(f"| {tag} | {_cells(table, load, tag)} |" for tag in _arms(load)),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cells(table: Table, load: Load, tag: str) -> str:
    return " | ".join(
        format(factor * table.mean(load.label, tag, figure), form)
        for figure, (_, factor, form) in COLUMNS.items()
    )


def _floors(table: Table, loads: Sequence[Load]) -> Iterator[Floor]:
    for load in loads:
        for tag in (PULLS, FAST_PULLS):
            for figure in ("ttft_mean", "ttft_p99") if tag in _arms(load) else ():
                floor = rival_floor(table, load, ROUTING, figure, ours=tag)
                if load is NOTHING_SHARED:
                    floor = replace(floor, floor=MOST_WITH_NOTHING_SHARED)
                yield floor


if __name__ == "__main__":
    main()
