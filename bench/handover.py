"""`python -m bench.handover`: pauses of streams, and tokens computed again, when a worker hands over what it runs.

One of two workers runs all sequences and is drained with no grace. The other one continues them. The demo model
computes on the CPU; router, workers and clients share one process. Rounds with pulls and without alternate. The links
are those that the workers have measured.
"""

import argparse
import asyncio
import random
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise

from blockyard.deploy.settings.options import model_path
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client.aio import AsyncClient
from blockyard.router.config import RouterConfig
from blockyard.router.server import RouterServer
from blockyard.worker.cache.block_tables import Hits
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.server import WorkerServer

SECRET = "bench"
BLOCK_SIZE = 16
TOKENS_BEFORE = 40
"""Tokens that each stream has before the drain."""
TOKENS_AFTER = 200
READY_SECONDS = 60.0


@dataclass(slots=True, kw_only=True)
class Round:
    """Figures of one drain."""

    known: int = 0
    """Tokens of all sequences, prompt and output, when they moved."""
    computed: int = 0
    """Tokens of them that the second worker computed again."""
    tails: int = 0
    """Tokens in blocks that are not full, and each last token. They must be computed again."""
    pulled_blocks: int = 0
    pauses: list[float]
    """Longest time between two tokens of each stream, from the drain on."""


def worker(number: int) -> WorkerServer:
    engine = EngineConfig(
        model=model_path("demo"), device="cpu", kv_cache_memory=256 << 20, host_cache_gib=0.25
    )
    return WorkerServer(
        WorkerConfig(engine=engine, worker_id=f"worker-{number}", cluster_secret=SECRET, redis_url=None)
    )


async def stream(client: AsyncClient, prompt: list[int], seed: int, begun: asyncio.Semaphore) -> list[float]:
    """Run one request, release `begun` at its TOKENS_BEFORE-th token, and return the times of its deltas."""
    times, num_tokens = [], 0
    async for delta in client.stream(
        prompt_token_ids=prompt, max_tokens=TOKENS_BEFORE + TOKENS_AFTER, ignore_eos=True, seed=seed
    ):
        times.append(time.monotonic())
        if num_tokens < TOKENS_BEFORE <= num_tokens + len(delta.token_ids):
            begun.release()
        num_tokens += len(delta.token_ids)
    return times


async def until_ready(client: AsyncClient, *, needs_links: bool) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            workers = await client.list_workers()
            ready = [one for one in workers if one.state == cluster_pb2.WORKER_STATE_READY]
            if len([one for one in ready if one.load.pull_bytes_per_second or not needs_links]) == 2:
                return
            await asyncio.sleep(0.05)


async def measured(num_sequences: int, prompt_tokens: int, *, pulls: bool, seed: int) -> Round:
    chance = random.Random(seed)
    result = Round(pauses=[])
    async with AsyncExitStack() as stack:
        workers = [worker(number) for number in range(2)]
        addresses = []
        for one in workers:
            addresses.append(await one.start())
            stack.push_async_callback(one.stop, 0.0)
        router = RouterServer(
            RouterConfig(
                model=model_path("demo"),
                model_names=("demo",),
                cluster_secret=SECRET,
                no_pull=not pulls,
                suspect_seconds=10.0,
                lost_seconds=20.0,
            )
        )
        client = await stack.enter_async_context(AsyncClient(await router.start()))
        stack.push_async_callback(router.stop, 1.0)
        router.set_workers(addresses)
        await until_ready(client, needs_links=pulls)
        await client.drain_worker("worker-1", grace_seconds=0.0)
        count(workers[1], result)
        begun = asyncio.Semaphore(0)
        prompts = [[chance.randrange(3, 4000) for _ in range(prompt_tokens)] for _ in range(num_sequences)]
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(stream(client, prompt, number, begun))
                for number, prompt in enumerate(prompts)
            ]
            for _ in streams:
                await begun.acquire()
            await client.resume_worker("worker-1")
            drained_at = time.monotonic()
            await client.drain_worker("worker-0", grace_seconds=0.0)
        result.pulled_blocks = workers[1]._loaded.engine.scheduler.pulls.num_blocks
        for one in streams:
            times = one.result()
            late = [after - before for before, after in pairwise(times) if after >= drained_at]
            result.pauses.append(max(late))
    return result


def count(destination: WorkerServer, result: Round) -> None:
    tables = destination._loaded.engine.scheduler.tables
    start = tables.start

    def started(sequence: Sequence, hits: Hits) -> None:
        start(sequence, hits)
        known = len(sequence.tokens)
        result.known += known
        result.computed += known - sequence.num_scheduled
        result.tails += (known - 1) % BLOCK_SIZE + 1

    tables.start = started  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for number in range(options.rounds):
        for pulls in (True, False):
            result = asyncio.run(measured(options.sequences, options.prompt_tokens, pulls=pulls, seed=number))
            pauses = sorted(result.pauses)
            print(
                f"{'pulls' if pulls else 'no pulls'}: {result.known} tokens moved, {result.computed} computed again, "
                f"{result.computed - result.tails} beyond tails, {result.pulled_blocks} blocks pulled; "
                f"longest pause of a stream: median {statistics.median(pauses):.3f} s, most {pauses[-1]:.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
