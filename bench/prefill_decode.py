"""Pauses of 16 streams while a prompt of 8,192 tokens is computed: on one worker, and on a worker of its own.

    python -m bench.prefill_decode

Two arms take turns. In the first, one worker has both cores. In the second, a `prefill` worker and a `decode` worker
have one core each, and the prompt's blocks move between them. The workers are processes with random weights of the demo
model's shape and a longer context. Router and clients share a process, and the cores.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from blockyard.proto.roles import Role
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client.aio import AsyncClient
from blockyard.router.config import RouterConfig
from blockyard.router.server import RouterServer

from bench.long_prompt import CONTEXT, DECODES, LONG_PROMPT, MIXED_STEP_SECONDS, write_model
from bench.reporting import Floor, percentile, write_report

SECRET = "bench"
SHORT_PROMPT = 64
TOKENS_BEFORE = 10
"""Tokens that each stream has before the long prompt comes."""
READY_SECONDS = 120.0
GOAL_PAUSE_SECONDS = 0.06
GOAL_RATE = 0.95
ARMS: dict[str, tuple[tuple[Role, tuple[int, ...]], ...]] = {
    "together": (("both", (0, 1)),),
    "apart": (("prefill", (0,)), ("decode", (1,))),
}
"""Role and cores of each worker of an arm. A number is a position in the cores that this process may use."""


@dataclass(slots=True)
class Figures:
    """Figures of one arm, over all rounds."""

    pauses: list[float] = field(default_factory=list)
    """Times between two tokens of the streams, from the long prompt's arrival until its first token."""
    rates: list[float] = field(default_factory=list)
    """Prompt and output tokens of all requests, a second, in each round."""
    first_tokens: list[float] = field(default_factory=list)
    """Times to the first token of the long prompt."""
    second_tokens: list[float] = field(default_factory=list)
    """Times from there to its second token."""
    num_splits: int = 0


def serve(model: str, number: int, role: Role, cores: Sequence[int], pipe: Connection) -> None:
    """Run a worker on these cores. Send its address, and stop at SIGTERM."""
    os.sched_setaffinity(0, cores)
    import torch
    from blockyard.worker.config import EngineConfig, WorkerConfig
    from blockyard.worker.server import WorkerServer

    # Importing this module has loaded torch, which counted all cores.
    torch.set_num_threads(len(cores))

    async def run() -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        engine = EngineConfig(
            model=model,
            device="cpu",
            load_format="random",
            kv_cache_memory=512 << 20,
            host_cache_gib=0.5,
            mixed_step_seconds=MIXED_STEP_SECONDS,
        )
        worker = WorkerServer(
            WorkerConfig(
                engine=engine, worker_id=f"worker-{number}", role=role, cluster_secret=SECRET, redis_url=None
            )
        )
        pipe.send(await worker.start())
        await stopped.wait()
        await worker.stop(0.0)

    asyncio.run(run())


@asynccontextmanager
async def cluster(model: str, workers: Sequence[tuple[Role, tuple[int, ...]]]) -> AsyncIterator[AsyncClient]:
    """Start these workers and a router. Yield a client once blocks could move between them."""
    spawn, usable = multiprocessing.get_context("spawn"), sorted(os.sched_getaffinity(0))
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for number, (role, positions) in enumerate(workers):
            here, there = spawn.Pipe()
            cores = [usable[position] for position in positions]
            process = spawn.Process(target=serve, args=(model, number, role, cores, there))
            process.start()
            started.append((process, here))
        addresses = [await asyncio.to_thread(pipe.recv) for _, pipe in started]
        router = RouterServer(
            RouterConfig(
                model=model,
                model_names=("demo",),
                cluster_secret=SECRET,
                suspect_seconds=10.0,
                lost_seconds=20.0,
            )
        )
        async with AsyncClient(await router.start()) as client:
            router.set_workers(addresses)
            await until_ready(client, len(addresses))
            yield client
        await router.stop(1.0)
    finally:
        for process, _ in started:
            process.terminate()
            process.join()


async def until_ready(client: AsyncClient, num_workers: int) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            workers = await client.list_workers()
            ready = [one for one in workers if one.state == cluster_pb2.WORKER_STATE_READY]
            has_links = num_workers == 1 or all(one.load.pull_bytes_per_second for one in ready)
            if len(ready) == num_workers and has_links:
                return
            await asyncio.sleep(0.05)


async def stream(
    client: AsyncClient, prompt: list[int], max_tokens: int, begun: asyncio.Semaphore
) -> list[float]:
    """Run a request, release `begun` at its TOKENS_BEFORE-th token, and return the times of its pieces."""
    times, num_tokens = [], 0
    async for delta in client.stream(
        prompt_token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, timeout_seconds=600.0
    ):
        times.append(time.perf_counter())
        if num_tokens < TOKENS_BEFORE <= num_tokens + len(delta.token_ids):
            begun.release()
        num_tokens += len(delta.token_ids)
    return times


async def measure(
    client: AsyncClient, seed: int, figures: Figures, *, long_prompt: int, max_tokens: int
) -> None:
    chance = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [chance.randrange(3, 4000) for _ in range(length)]

    begun = asyncio.Semaphore(0)
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        streams = [
            tasks.create_task(stream(client, prompt(SHORT_PROMPT), max_tokens, begun)) for _ in range(DECODES)
        ]
        for _ in streams:
            await begun.acquire()
        arrived = time.perf_counter()
        long = tasks.create_task(stream(client, prompt(long_prompt), max_tokens, begun))
    seconds = time.perf_counter() - started
    first, second = long.result()[:2]
    figures.first_tokens.append(first - arrived)
    figures.second_tokens.append(second - first)
    figures.rates.append((DECODES * (SHORT_PROMPT + max_tokens) + long_prompt + max_tokens) / seconds)
    for one in streams:
        figures.pauses += [
            after - before for before, after in pairwise(one.result()) if arrived <= after <= first
        ]
    figures.num_splits = (await client.cluster_info()).splits


async def run(rounds: int, long_prompt: int, max_tokens: int) -> dict[str, Figures]:
    figures = {arm: Figures() for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for number in range(rounds):
            for arm, workers in ARMS.items():
                async with cluster(folder, workers) as client:
                    # Warms up, and lets routers measure the workers.
                    await measure(client, 0, Figures(), long_prompt=long_prompt, max_tokens=max_tokens)
                    await measure(
                        client, number + 1, figures[arm], long_prompt=long_prompt, max_tokens=max_tokens
                    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=LONG_PROMPT, help="length of the long prompt")
    parser.add_argument("--max-tokens", type=int, default=400, help="tokens of each output")
    parser.add_argument("--report", action="store_true", help="write a report under bench/reports")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("it takes two cores")
    if options.prompt_tokens + options.max_tokens > CONTEXT:
        parser.error(f"prompt and output exceed the context of {CONTEXT} tokens")
    report(asyncio.run(run(options.rounds, options.prompt_tokens, options.max_tokens)), write=options.report)


def report(figures: dict[str, Figures], *, write: bool) -> None:
    rows, numbers = [], {}
    for arm, known in figures.items():
        # A fast prompt may end before any stream has two more tokens.
        pauses = known.pauses or [0.0]
        numbers[arm] = {
            "pause_p50_ms": 1000 * percentile(pauses, 0.5),
            "pause_p99_ms": 1000 * percentile(pauses, 0.99),
            "tokens_per_second": statistics.median(known.rates),
            "first_token_ms": 1000 * statistics.median(known.first_tokens),
            "second_token_ms": 1000 * statistics.median(known.second_tokens),
            "splits": float(known.num_splits),
        }
        rows.append(f"| {arm} | " + " | ".join(f"{value:,.1f}" for value in numbers[arm].values()) + " |")
    rate = numbers["apart"]["tokens_per_second"] / numbers["together"]["tokens_per_second"]
    text = "\n".join(
        [
            "| arm | " + " | ".join(name.replace("_", " ") for name in numbers["apart"]) + " |",
            "|---|" + "---|" * len(numbers["apart"]),
            *rows,
            "",
            f"Tokens a second, apart / together: {rate:.3f}.",
        ]
    )
    print(text)
    if write:
        write_report(
            "prefill-decode",
            title="Streams beside a long prompt, on one worker and on two",
            text=text,
            figures=numbers,
            floors=[
                Floor(
                    name="p99 pause of streams beside a long prompt, apart, ms",
                    value=round(numbers["apart"]["pause_p99_ms"], 1),
                    floor=1000 * GOAL_PAUSE_SECONDS,
                    better="lower",
                ),
                Floor(
                    name="tokens a second, apart / together",
                    value=round(rate, 3),
                    floor=GOAL_RATE,
                    better="higher",
                ),
            ],
            versions={"torch": version("torch")},
        )


if __name__ == "__main__":
    main()
