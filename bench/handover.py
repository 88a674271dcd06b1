"""Pauses of streams, and tokens that are computed again, when a worker hands over what it runs.

    python -m bench.handover

One of two workers runs all requests and is drained with no grace. The other one continues them. Rounds with pulls and
without take turns. Router and workers are processes of their own, and each worker computes with one thread.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any

import grpc
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client.aio import AsyncClient
from blockyard.router.client.errors import BlockyardError

from bench.engine.shapes import model_folder
from bench.reporting import Floor, write_report
from bench.router.processes import SECRET_VARIABLE, cpu_clock, foreign_cores, free_port, running_server
from bench.transfer.rig import Worker

BLOCK_SIZE = 16
TOKENS_BEFORE = 40
"""Tokens that each stream has before the drain."""
TOKENS_AFTER = 250
"""Enough that no stream ends while the last prompts are computed."""
READY_SECONDS = 180.0
CACHE_GIB = 1
"""Size of each worker's KV pool, and of its host cache."""
SETTLE_SECONDS = 1.0
"""Time for the last load report after the last token. Workers report every half second."""
MOST_PAUSE_SECONDS = 0.3
MOST_AGAIN_TOKENS = BLOCK_SIZE
"""Tokens of a sequence beyond its full blocks, which no worker can fetch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Figures of one drain."""

    pulls: bool
    moved_tokens: int
    """Tokens of all sequences, prompt and output, that clients had when they moved."""
    again_tokens: int
    """Tokens that the second worker computed and did not sample."""
    pulled_blocks: int
    pauses: list[float]
    """Longest time between two tokens of each stream, from the drain on, in seconds."""
    foreign_cores: float

    @property
    def p99_pause(self) -> float:
        return sorted(self.pauses)[int(0.99 * (len(self.pauses) - 1) + 0.5)]


async def stream(client: AsyncClient, prompt: list[int], seed: int, begun: asyncio.Semaphore) -> list[float]:
    """Run one request, release `begun` at its TOKENS_BEFORE-th token, and return the time of each token."""
    times: list[float] = []
    async for delta in client.stream(
        prompt_token_ids=prompt,
        max_tokens=TOKENS_BEFORE + TOKENS_AFTER,
        ignore_eos=True,
        seed=seed,
        timeout_seconds=600.0,
    ):
        was_short = len(times) < TOKENS_BEFORE
        times += [time.monotonic()] * len(delta.token_ids)
        if was_short and len(times) >= TOKENS_BEFORE:
            begun.release()
    return times


async def until_ready(client: AsyncClient, *, needs_links: bool) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            workers = await client.list_workers()
            ready = [one for one in workers if one.state == cluster_pb2.WORKER_STATE_READY]
            if len([one for one in ready if one.load.pull_bytes_per_second or not needs_links]) == 2:
                return
            await asyncio.sleep(0.05)


async def load_of(client: AsyncClient, worker_id: str) -> cluster_pb2.WorkerLoad:
    return next(one.load for one in await client.list_workers() if one.worker_id == worker_id)


async def measured(
    options: argparse.Namespace, folder: Path, model: Path, *, pulls: bool, seed: int
) -> Round:
    chance = random.Random(seed)
    secret, address = token_hex(32), f"127.0.0.1:{free_port()}"
    load_format = "auto" if options.model == "demo" else "random"
    settings = [
        *("--model", str(model), "--device", "cpu", "--dtype", "float32", "--load-format", load_format),
        *("--kv-cache-memory", f"{CACHE_GIB}GiB", "--host-cache-gib", str(CACHE_GIB)),
        *("--lend-share", "0.95", "--grace-seconds", "0"),
    ]
    workers = [
        Worker(f"worker-{number}", settings, secret=secret, folder=folder, host="127.0.0.1")
        for number in (0, 1)
    ]
    command = [
        sys.executable,
        "-m",
        "blockyard.router",
        "--model",
        str(model),
        "--port",
        address.partition(":")[2],
    ]
    command += [word for one in workers for word in ("--worker", one.address)] + ["--no-pull"] * (not pulls)

    async def answers() -> bool:
        async with AsyncClient(address) as client:
            try:
                return len(await client.list_workers()) == 2
            except (BlockyardError, grpc.RpcError):
                return False

    async with AsyncExitStack() as stack:
        for one in workers:
            one.spawn()
            stack.callback(one.end)
        environment = {SECRET_VARIABLE: secret}
        await stack.enter_async_context(running_server(command, folder / "router.log", answers, environment))
        client = await stack.enter_async_context(AsyncClient(address))
        await until_ready(client, needs_links=pulls)
        await client.drain_worker("worker-1", grace_seconds=0.0)
        begun = asyncio.Semaphore(0)
        vocabulary = range(3, 4000)
        prompts = [chance.choices(vocabulary, k=options.prompt_tokens) for _ in range(options.sequences)]
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(stream(client, prompt, number, begun))
                for number, prompt in enumerate(prompts)
            ]
            for _ in streams:
                await begun.acquire()
            await client.resume_worker("worker-1")
            before = await load_of(client, "worker-1")
            clock, drained_at = cpu_clock(()), time.monotonic()
            await client.drain_worker("worker-0", grace_seconds=0.0)
        foreign = foreign_cores(clock, cpu_clock(()))
        await asyncio.sleep(SETTLE_SECONDS)
        after = await load_of(client, "worker-1")
    times = [one.result() for one in streams]
    return Round(
        pulls=pulls,
        moved_tokens=sum(
            options.prompt_tokens + len([arrival for arrival in each if arrival < drained_at])
            for each in times
        ),
        again_tokens=after.step_prompt_tokens - before.step_prompt_tokens,
        pulled_blocks=after.pulled_blocks - before.pulled_blocks,
        pauses=[max(late - early for early, late in pairwise(each) if late >= drained_at) for each in times],
        foreign_cores=foreign,
    )


def figures_of(rounds: Sequence[Round], sequences: int) -> dict[str, Any]:
    """Return the medians of the rounds with pulls and of those without."""
    figures: dict[str, Any] = {"rounds": [asdict(one) for one in rounds]}
    for name, pulls in (("pulls", True), ("no pulls", False)):
        some = [one for one in rounds if one.pulls is pulls]
        figures[name] = {
            "moved_tokens": statistics.median(one.moved_tokens for one in some),
            "again_tokens": statistics.median(one.again_tokens for one in some),
            "most_again_a_sequence": max(one.again_tokens for one in some) / sequences,
            "pulled_blocks": statistics.median(one.pulled_blocks for one in some),
            "median_pause": statistics.median(statistics.median(one.pauses) for one in some),
            "p99_pause": statistics.median(one.p99_pause for one in some),
            "foreign_cores": round(statistics.fmean(one.foreign_cores for one in some), 2),
        }
    return figures


def floors_of(figures: dict[str, Any]) -> list[Floor]:
    return [
        Floor(
            name="tokens computed again a sequence, most of the rounds",
            value=figures["pulls"]["most_again_a_sequence"],
            floor=MOST_AGAIN_TOKENS,
            better="lower",
        ),
        Floor(
            name="p99 of the streams' longest pauses, s",
            value=figures["pulls"]["p99_pause"],
            floor=MOST_PAUSE_SECONDS,
            better="lower",
        ),
    ]


def text_of(figures: dict[str, Any], options: argparse.Namespace) -> str:
    assert __doc__ is not None
    head = (
        f"{__doc__.rpartition(chr(10) * 2)[2].strip()}\n\n"
        f"{options.model} in float32, {options.sequences} requests with {options.prompt_tokens} prompt tokens each. "
        f"The drain begins when each has {TOKENS_BEFORE} tokens. {options.rounds} rounds of each kind. A block has "
        f"{BLOCK_SIZE} tokens. The tokens of a sequence beyond its "
        "full blocks are always computed again.\n"
    )
    rows = [
        "| | tokens moved | computed again | blocks pulled | pause p50, ms | p99, ms | foreign cores |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("pulls", "no pulls"):
        one = figures[name]
        rows.append(
            f"| {name} | {one['moved_tokens']:,.0f} | {one['again_tokens']:,.0f} | {one['pulled_blocks']:,.0f} "
            f"| {1000 * one['median_pause']:.0f} | {1000 * one['p99_pause']:.0f} | {one['foreign_cores']} |"
        )
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-166m", help="a shape of bench.engine, or demo")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3, help="rounds with pulls, and as many without")
    parser.add_argument("--no-report", action="store_true", help="print the figures, and write no report")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="blockyard-handover-") as temporary:
        folder = Path(temporary)
        model = model_folder(options.model, "float32", folder, with_weights=False)
        for number in range(options.rounds):
            for pulls in (True, False) if number % 2 else (False, True):
                rounds.append(asyncio.run(measured(options, folder, model, pulls=pulls, seed=number)))
                print(rounds[-1], file=sys.stderr, flush=True)
    figures = figures_of(rounds, options.sequences)
    text = text_of(figures, options)
    print(text)
    if not options.no_report:
        write_report(
            "handover",
            title="Running requests that a drained worker hands over",
            text=text,
            figures=figures,
            floors=floors_of(figures),
            versions={"torch": version("torch")},
        )


if __name__ == "__main__":
    main()
