"""`prefix` beside its rivals on loads of different character, in virtual time.

    python -m bench.placement.rivals --trace conversation.jsonl

The rivals are `prefix` with uniform speeds, Dynamo's published cost, and the least load. With five seeds on one core it
takes about 20 minutes; `--keep FOLDER` goes on where it was ended. Each seed has its own part of the trace. The other
loads, policies and Dynamo's own simulator are in `python -m bench.placement`.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from bench.placement.simulation.profile import HardwareProfile
from bench.placement.simulation.simulator import Setup
from bench.placement.simulation.study import RIVAL_LOADS, Job, Load, Table, run_table
from bench.placement.text import RIVAL_TEXT, RIVALS, UNIFORM_TAG, cells, heading, rival_floors
from bench.reporting import write_report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement.rivals")
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--keep", type=Path, help="a folder for the result of each run, as of bench.placement"
    )
    options = parser.parse_args()
    loads = list(RIVAL_LOADS)
    if options.trace is not None:
        loads.append(Load(workload="trace", rate=4, seconds=40, trace=str(options.trace)))
    table = run_table(rival_jobs(loads, range(options.seeds)), processes=options.processes, keep=options.keep)
    path = write_report(
        "placement-rivals",
        title="Placement: `prefix` beside its rivals on loads of different character",
        text=_text(table, loads, options.seeds),
        figures={"profile": HardwareProfile().as_dict(), "cells": table.as_dict()},
        floors=rival_floors(table, loads),
        versions={},
    )
    print(path.read_text(encoding="utf-8"))


def rival_jobs(loads: Sequence[Load], seeds: Sequence[int]) -> list[Job]:
    return [
        Job(load=load, setup=Setup(policy=policy, seed=seed, has_uniform_speeds=tag == UNIFORM_TAG), tag=tag)
        for load in loads
        for tag, policy in RIVALS.items()
        for seed in seeds
    ]


def _text(table: Table, loads: Sequence[Load], num_seeds: int) -> str:
    rows = [
        f"| {load.label} | {table.mean(load.label, 'prefix', 'ideal_reuse'):.3f} | {tag} "
        f"| {cells(load.label, tag, table)} |"
        for load in loads
        for tag in RIVALS
    ]
    about = f"Seeds: {num_seeds}, time is virtual, workers are {HardwareProfile().name} by a roofline. {RIVAL_TEXT}"
    return "\n".join([about, "", *heading("load", "ideal reuse", "policy"), *rows])


if __name__ == "__main__":
    main()
