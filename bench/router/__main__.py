"""Benchmark of the router alone, and beside sglang-router, in turns in one run.

    python -m bench.router --sglang-python PY --py-spy PATH

1. The placement path in process: token ids -> names -> a real Redis -> a worker.
2. One stream at a time through a real router process: the delay that it adds to the first token and to later ones.
3. Many streams at once: tokens/s, and tokens/s per core that the router uses. Also with sessions in plaintext, and with
   an earlier commit if `--before` gives a checkout, to show the cost of TLS. Also with 2 and 4 processes on one port.
   The same over HTTP, with the CPU time of a request.
4. The same through sglang-router with equal HTTP workers, if `--sglang-python` gives a Python that has it.
5. A flame graph of our router under load, if `--py-spy` gives that program.

Needs Linux. Takes four to five minutes; `--quick` takes half a minute, with too few repeats for a claim.
"""

import argparse
import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.deploy.settings.options import model_path
from blockyard.proto.naming.fingerprint import tokenizer_fingerprint
from blockyard.proto.text import load_tokenizer

from bench.plots import draw
from bench.reporting import REPORTS
from bench.router import flame, report
from bench.router.figures import Results, Setting
from bench.router.placement import PlacementTimes, placement_bench, tokenizing_times
from bench.router.processes import ROOT, Workers, cpu_clock, foreign_cores, running_workers
from bench.router.systems import System, engine_session, http_worker, our_router, over_http, sglang_router
from bench.router.trials import many_streams, one_stream, request_cost

MODEL = model_path("demo")
SECRET = "of the benchmark"
STEP_SECONDS = 0.05
"""Time between two tokens of a stream. At 20 ms, 256 streams with their clients and workers would fill two cores."""
GROUPS = 8
"""Number of groups of prompts that begin alike."""
PROMPT_LINES = 60
REQUEST_LINES = 98
"""Lines of a prompt with about 600 tokens."""
REQUEST_TOKENS = 32
LONG_PROMPT_LINES = 1198
"""Lines of a prompt with about 7,200 tokens."""
MANY_STREAMS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of repeats and requests, and durations."""

    repeats: int = 5
    placements: int = 300
    tokenizings: int = 60
    requests: int = 8
    """Requests in a trial of one stream, one after another."""
    tokens: int = 6
    """Tokens of each of these requests."""
    streams: tuple[int, ...] = (64, MANY_STREAMS)
    pairs: int = 5
    """Trials of many streams for each system."""
    seconds: float = 2.0
    """Duration of counting, once all streams run."""
    cost_requests: int = 256
    """Requests in a trial of the CPU time of a request, a quarter of them at once."""
    processes: tuple[int, ...] = (1, 2, 4)
    flame_seconds: float = 5.0


QUICK = Plan(
    repeats=1,
    pairs=1,
    placements=50,
    tokenizings=5,
    requests=3,
    tokens=5,
    streams=(16,),
    seconds=1.0,
    cost_requests=32,
    processes=(),
    flame_seconds=2.0,
)


def prompt(number: int, lines: int = PROMPT_LINES) -> str:
    """Return a prompt of one of the groups. Only its last line is its own."""
    return f"def group_{number % GROUPS}(value):\n" + "    value = value + 1\n" * lines + f"# {number}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Shared state of the parts of a run."""

    plan: Plan
    results: Results
    stack: AsyncExitStack
    folder: Path
    redis_url: str
    workers: Workers
    prompt_ids: Sequence[int]


@contextmanager
def noting_foreign_cores(results: Results, part: str) -> Iterator[None]:
    before = cpu_clock(())
    yield
    results.foreign_cores.setdefault(part, []).append(foreign_cores(before, cpu_clock(())))


async def measure_placement(plan: Plan, results: Results) -> None:
    async with placement_bench(seed=1) as bench:
        for _ in range(plan.repeats):
            results.placement.append(PlacementTimes())
            with noting_foreign_cores(results, "placement"):
                await bench.measure(results.placement[-1], plan.placements)
    results.tokenizing, results.tokenizing_tokens = await tokenizing_times(
        MODEL, lambda number: prompt(number, LONG_PROMPT_LINES), plan.tokenizings
    )


async def start_router(bench: Bench, num_processes: int = 1) -> System:
    return await _start_router(bench, bench.workers, f"router-{num_processes}", num_processes)


async def start_plaintext_router(bench: Bench, fingerprint: str, root: Path) -> System:
    workers = await bench.stack.enter_async_context(
        running_workers("bench.router.workers", str(STEP_SECONDS), fingerprint, root=root)
    )
    return await _start_router(bench, workers, f"plaintext-{root.name}", 1)


async def _start_router(bench: Bench, workers: Workers, name: str, num_processes: int) -> System:
    folder = bench.folder / name
    folder.mkdir()
    return await bench.stack.enter_async_context(
        our_router(MODEL, workers, prompt, folder, bench.redis_url, num_processes=num_processes)
    )


async def start_peers(bench: Bench, python: Path | None) -> tuple[System, ...]:
    """Start sglang-router, and return it and its worker alone. Return nothing without its Python."""
    if python is None:
        return ()
    workers = await bench.stack.enter_async_context(running_workers("bench.router.peers", str(STEP_SECONDS)))
    router = await bench.stack.enter_async_context(sglang_router(python, workers, prompt, bench.folder))
    return router, http_worker(workers, prompt)


async def measure_one_stream(bench: Bench, systems: Sequence[System]) -> None:
    plan = bench.plan
    for system in systems:
        await one_stream(system, num_requests=2, num_tokens=plan.tokens)  # Warm up.
    for _ in range(plan.repeats):
        with noting_foreign_cores(bench.results, "one stream"):
            for system in systems:
                ways = await one_stream(system, plan.requests, plan.tokens)
                bench.results.one_stream.setdefault(system.name, []).append(ways)


async def measure_many_streams(bench: Bench, systems: Sequence[System]) -> None:
    for streams in bench.plan.streams:
        of_systems = bench.results.load.setdefault(streams, {system.name: [] for system in systems})
        for repeat in range(bench.plan.pairs):
            for system in systems[:: -1 if repeat % 2 else 1]:
                of_systems[system.name].append(await many_streams(system, streams, bench.plan.seconds))


async def measure_requests(bench: Bench, routers: Sequence[System]) -> None:
    plan = bench.plan
    systems = [
        system
        for router in routers
        for system in (router, over_http(router, lambda number: prompt(number, REQUEST_LINES)))
    ]
    for repeat in range(plan.repeats):
        for system in systems[:: -1 if repeat % 2 else 1]:
            trial = await request_cost(
                system,
                plan.cost_requests,
                REQUEST_TOKENS,
                at_once=plan.cost_requests // 4,
                idle_seconds=plan.seconds,
            )
            bench.results.requests.setdefault(system.name, []).append(trial)


async def measure_processes(bench: Bench, ours: System) -> None:
    systems = {
        number: ours if number == 1 else await start_router(bench, number) for number in bench.plan.processes
    }
    for _ in range(bench.plan.repeats):
        for number, system in systems.items():
            trial = await many_streams(system, MANY_STREAMS, bench.plan.seconds)
            bench.results.processes.setdefault(number, []).append(trial)


async def record_flame(bench: Bench, ours: System, py_spy: Path, picture: Path) -> None:
    folded = bench.folder / "folded"
    seconds, streams = bench.plan.flame_seconds, bench.plan.streams[-1]
    outputs: dict[flame.Form, Path] = {"flamegraph": picture, "raw": folded}
    for form, output in outputs.items():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(many_streams(ours, streams, seconds))
            tasks.create_task(flame.record(py_spy, ours.pids[0], seconds, form, output))
    flame.entitle(picture, f"Blockyard's router, {streams} streams")
    bench.results.flame = flame.shares(folded.read_text(encoding="utf-8").splitlines())


async def run(arguments: argparse.Namespace) -> None:
    plan = (
        QUICK
        if arguments.quick
        else Plan(pairs=arguments.pairs, streams=arguments.streams, processes=arguments.processes)
    )
    results = Results()
    stem = f"{date.today().isoformat()}-router"
    arguments.output.mkdir(parents=True, exist_ok=True)
    await measure_placement(plan, results)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        redis = start_private_redis(folder / "redis")
        stack.callback(redis.stop)
        fingerprint = tokenizer_fingerprint(Path(MODEL))
        workers = await stack.enter_async_context(
            running_workers("bench.router.workers", str(STEP_SECONDS), fingerprint, secret=SECRET)
        )
        bench = Bench(
            plan=plan,
            results=results,
            stack=stack,
            folder=folder,
            redis_url=redis.url,
            workers=workers,
            prompt_ids=load_tokenizer(MODEL).encode(prompt(0)),
        )
        ours = await start_router(bench)
        roots = (ROOT, *([arguments.before.resolve()] if arguments.before else []))
        plaintext = [await start_plaintext_router(bench, fingerprint, root) for root in roots]
        peers = await start_peers(bench, arguments.sglang_python)
        await measure_one_stream(bench, (ours, engine_session(workers, bench.prompt_ids), *peers))
        ways = [way for router in (ours, *plaintext) for way in (router, over_http(router, prompt))]
        await measure_many_streams(bench, (*ways, *peers[:1]))
        await measure_requests(bench, (ours, *plaintext))
        if arguments.py_spy is not None:
            await record_flame(bench, ours, arguments.py_spy, arguments.output / f"{stem}.svg")
        await measure_processes(bench, ours)
    setting = Setting(
        repeats=plan.repeats,
        step_seconds=STEP_SECONDS,
        prompt_tokens=len(bench.prompt_ids),
        sglang_version=sglang_version(arguments.sglang_python),
        many_streams=plan.streams[-1],
        request_tokens=(len(load_tokenizer(MODEL).encode(prompt(0, REQUEST_LINES))), REQUEST_TOKENS),
    )
    path = report.write(results, setting, arguments.output)
    draw(path)
    print(path.read_text(encoding="utf-8"))


def sglang_version(python: Path | None) -> str | None:
    if python is None:
        return None
    command = "from importlib.metadata import version; print(version('sglang-router'))"
    return subprocess.run([python, "-c", command], check=True, capture_output=True, text=True).stdout.strip()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.router", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sglang-python", type=Path, help="a Python with sglang-router 0.3.2")
    parser.add_argument(
        "--py-spy", type=Path, help="path of py-spy; needs the right to trace a child process"
    )
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--pairs", type=int, default=5, help="trials of many streams for each system")
    parser.add_argument("--streams", type=numbers, default=Plan().streams, help="streams at once, as 64,256")
    parser.add_argument(
        "--processes",
        type=numbers,
        default=Plan().processes,
        help="numbers of router processes on one port, as 1,2,4; empty for none",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
