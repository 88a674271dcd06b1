"""LoRA adapters: hits and times to the first token by placement policy, in virtual time.

    python -m bench.placement.adapters

The shape is that of the simulation published with NVIDIA Dynamo (lib/llm/tests/lora_simulation, "Zipf and Poisson"). It
has 100 adapters of Zipf popularity 1, 8 workers with 4 slots each, and 200 ticks of 3 s with 40 requests each. There
routing targets change once a tick, requests take no time, and those of one adapter arrive in a row. Here whole
routers and workers run, and arrivals are mixed. Dynamo's random numbers are not Python's, so a seed gives other
arrivals. `--quick` has one seed and 50 s, and writes no report. With `--keep FOLDER` it goes on where it was ended.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from blockyard.router.placement.config import PlacementConfig

from bench.placement.simulation.profile import HardwareProfile
from bench.placement.simulation.simulator import Setup
from bench.placement.simulation.study import Job, Load, Table, run_table
from bench.placement.simulation.workloads import NUM_ADAPTERS
from bench.reporting import Floor, write_report

SEEDS = (42, 0, 1, 2, 3)
RATE = 40 / 3
SECONDS = 600.0
LOAD_MS = 100
"""Time of a load. Steps wait for it."""
MAX_LORAS = 4
RANDOM = PlacementConfig(dynamo_temperature=1e6)
"""Dynamo's policy draws among all workers alike at such a temperature."""
LEAST_HITS = 0.70
DYNAMO = "Dynamo publishes 46.9 % for random targets, 66.5 % for rendezvous hashing, 67.4 % for min-cost flow"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement.adapters")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default %(default)g")
    parser.add_argument("--keep", type=Path, help="a folder for the result of each run")
    parser.add_argument("--quick", action="store_true", help="one seed, 50 s, no report")
    options = parser.parse_args()
    seeds, seconds = (SEEDS[:1], 50.0) if options.quick else (SEEDS, options.seconds)
    load = Load(workload="adapters", rate=RATE, seconds=seconds)
    table = run_table(list(_jobs(load, seeds)), processes=options.processes, keep=options.keep)
    text = _text(table, load, len(seeds))
    print(text)
    if not options.quick:
        write_report(
            "placement-adapters",
            title="Placement: requests for 100 LoRA adapters on 8 workers with 4 slots each",
            text=text,
            figures={"cells": table.as_dict()},
            floors=list(_floors(table, load)),
            versions={},
        )


def _setups() -> dict[str, Setup]:
    cluster = Setup(
        profile=HardwareProfile(adapter_load_seconds=LOAD_MS / 1000),
        num_adapters=NUM_ADAPTERS,
        max_loras=MAX_LORAS,
    )
    return {
        "prefix": cluster,
        "round_robin": replace(cluster, policy="round_robin"),
        "random": replace(cluster, policy="dynamo", placement=RANDOM),
    }


def _jobs(load: Load, seeds: Sequence[int]) -> Iterator[Job]:
    for seed in seeds:
        for tag, setup in _setups().items():
            yield Job(load=load, setup=replace(setup, seed=seed), tag=tag)


def _hits(table: Table, load: Load, tag: str) -> dict[int, float]:
    """Return the share of requests that found their adapter on the device, or on its way there, by seed."""
    loads, requests = (table.by_seed(load.label, tag, figure) for figure in ("adapter_loads", "num_requests"))
    return {seed: 1 - loads[seed] / requests[seed] for seed in loads}


def _text(table: Table, load: Load, num_seeds: int) -> str:
    first = _hits(table, load, "prefix").get(SEEDS[0], 0.0)
    lines = [
        f"Seeds: {num_seeds}, {load.seconds:g} s from empty slots, {RATE:.1f} requests a second. Each has a prompt of "
        "its own with 256 tokens. H200 with Qwen3-8B by a roofline. A load takes "
        f"{LOAD_MS} ms, and the worker's steps wait for it. A hit is a request whose adapter is on the device, or on "
        f"its way there for another request. With seed {SEEDS[0]}, `prefix` hits {100 * first:.1f} %. {DYNAMO}. Its "
        "model differs (see the script).",
        "",
        "| policy | hits mean, % | hits least, % | TTFT mean, ms | TTFT p99, ms |",
        "|---|---|---|---|---|",
    ]
    for tag in _setups():
        hits = list(_hits(table, load, tag).values())
        mean, p99 = (1000 * table.mean(load.label, tag, figure) for figure in ("ttft_mean", "ttft_p99"))
        lines.append(f"| {tag} | {100 * fmean(hits):.1f} | {100 * min(hits):.1f} | {mean:.1f} | {p99:.1f} |")
    return "\n".join(lines)


def _floors(table: Table, load: Load) -> Iterator[Floor]:
    least = min(_hits(table, load, "prefix").values())
    yield Floor(name="least hits", value=least, floor=LEAST_HITS, better="higher")
    for figure, name in (("ttft_mean", "mean TTFT"), ("ttft_p99", "TTFT p99")):
        for other in ("round_robin", "random"):
            ratio = fmean(table.ratios(load.label, "prefix", other, figure))
            yield Floor(name=f"{name} over that of {other}", value=ratio, floor=1.0, better="lower")


if __name__ == "__main__":
    main()
