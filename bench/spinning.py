"""Best spin count of OpenMP's waiting threads before they sleep: our engine with several spin counts, in turns.

    python -m bench.spinning --model llama-166m

Measures the engine alone, and beside a program that keeps one core busy. Prints and keeps a report. In both settings, a
worker's spin count (`blockyard.worker.startup.openmp.SPIN_COUNT`) must be at most a fifth slower than the best.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from blockyard.worker.startup.openmp import SPIN_COUNT

from bench.engine.figures import DISTURBING_CORES, middle
from bench.engine.shapes import model_folder
from bench.engine.systems import Running, Trial, our_systems, running
from bench.engine.workloads import requests_of
from bench.proof import prove
from bench.reporting import REPORTS, Floor, write_report

COUNTS = tuple(sorted({1000, 10_000, 30_000, SPIN_COUNT}))
"""Spin counts. libgomp's default is 300,000, and 1,000 if it has more threads than cores."""
WORKLOAD = "brief"
PROOF = ("tests/unit/worker/test_engine_tokens.py",)
MEMORY_BYTES = 6 * 2**30
MOST_SLOWER = 1.2


@contextmanager
def neighbour(*, is_there: bool) -> Iterator[None]:
    """Run a program that keeps one core busy, if `is_there`."""
    if not is_there:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def measure(model: Path, repeats: int, folder: Path) -> dict[str, dict[int, list[Trial]]]:
    """Run an engine with each spin count, alone and beside a busy program. Return trials by setting and count."""
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    settings = {
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "kv_bytes": 2**29,
        "max_model_len": 2048,
        "max_num_seqs": 256,
        "threads": os.cpu_count(),
    }
    (system,) = our_systems(settings, backends=["auto"], is_served=False, is_unshared=False)
    trials: dict[str, dict[int, list[Trial]]] = {}
    async with AsyncExitStack() as stack:
        ready: dict[int, Running] = {}
        for count in COUNTS:
            env = {"OMP_NUM_THREADS": str(os.cpu_count()), "GOMP_SPINCOUNT": str(count)}
            started = await stack.enter_async_context(running(replace(system, env=env), folder, MEMORY_BYTES))
            if isinstance(started, str):
                raise RuntimeError(started)
            ready[count] = started
        for setting, is_there in (("alone", False), ("beside one busy program", True)):
            with neighbour(is_there=is_there):
                trials[setting] = await _in_turns(ready, vocab_size, repeats)
    return trials


async def _in_turns(ready: dict[int, Running], vocab_size: int, repeats: int) -> dict[int, list[Trial]]:
    """Run each repeat in a rotated order of counts. The first repeat warms up."""
    trials: dict[int, list[Trial]] = {count: [] for count in ready}
    for repeat in range(repeats + 1):
        requests = requests_of(WORKLOAD, vocab_size=vocab_size, rate=1.0, repeat=repeat)
        turn = repeat % len(COUNTS)
        for count in COUNTS[turn:] + COUNTS[:turn]:
            trial = await ready[count].run(requests)
            if repeat:
                trials[count].append(trial)
    return trials


def figures_of(trials: dict[str, dict[int, list[Trial]]]) -> dict[str, Any]:
    return {
        setting: {
            str(count): {
                "seconds": middle(trial.seconds for trial in of_count),
                "disturbed": sum(trial.foreign_cores > DISTURBING_CORES for trial in of_count),
                "trials": len(of_count),
            }
            for count, of_count in by_count.items()
        }
        for setting, by_count in trials.items()
    }


def slower(by_count: dict[int, list[Trial]]) -> float:
    """Return the worst slowdown of a worker's count: its median ratio of seconds to any other count."""
    return max(
        median(
            ours.seconds / theirs.seconds for ours, theirs in zip(by_count[SPIN_COUNT], others, strict=True)
        )
        for count, others in by_count.items()
        if count != SPIN_COUNT
    )


def text_of(figures: dict[str, Any]) -> str:
    head = (
        "| | spin count | seconds, median | lowest-highest | trials | disturbed |\n|---|---|---|---|---|---|"
    )
    rows = [
        f"| {setting} | {int(count):,} | {row['seconds']['median']:.2f} "
        f"| {row['seconds']['lowest']:.2f}-{row['seconds']['highest']:.2f} | {row['trials']} | {row['disturbed']} |"
        for setting, by_count in figures.items()
        for count, row in by_count.items()
    ]
    about = (
        "32 requests at once, 40 tokens in and 17 out, float32. Each spin count is a process of its own, and they run "
        "in turns. A trial is disturbed if other programs or virtual machines used more than "
        f"{DISTURBING_CORES} cores. The busy program of the second setting is part of the benchmark and does not count."
    )
    return "\n".join([about, "", head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.spinning", description=__doc__)
    parser.add_argument("--model", default="llama-166m", help="a shape, demo, or a checkpoint folder")
    parser.add_argument(
        "--models", type=Path, help="folder that keeps generated models; default: a temporary one"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=REPORTS)
    arguments = parser.parse_args()
    proven = prove(PROOF)
    with TemporaryDirectory(prefix="blockyard-bench-") as scratch:
        folder = (arguments.models or Path(scratch)).absolute()
        model = model_folder(arguments.model, "float32", folder, with_weights=True).absolute()
        trials = asyncio.run(measure(model, arguments.repeats, Path(scratch)))
    figures = figures_of(trials)
    floors = [
        Floor(
            name=f"{setting}: {SPIN_COUNT:,} / the best",
            value=slower(trials[setting]),
            floor=MOST_SLOWER,
            better="lower",
        )
        for setting in figures
    ]
    path = write_report(
        "spinning",
        title="How long OpenMP's waiting threads spin",
        text=f"{text_of(figures)}\n\nProven before: {proven}.",
        figures=figures,
        floors=floors,
        versions={},
        folder=arguments.output,
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
