"""The workers' pools bound the index's memory, however many prefixes pass through them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.naming.block_hash import chain as chain_names
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import num_entries
from blockyard.worker.indexing.state import PublisherConfig
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.simulated.runner import SimulatedRunner
from redis.asyncio import Redis

from tests.unit.index.harness import record

BLOCK_SIZE = 16
POOL_BLOCKS = 256
HOST_BLOCKS = 64
PROMPT_BLOCKS = 8
PROMPTS_A_STEP = 10
ROOT = bytes(16)
QUICK = PublisherConfig(lease_seconds=0.6, flush_seconds=0.002, purge_seconds=0.05, purge_slice_seconds=0.002)


class ChurningWorker:
    """A real engine that serves ever new prompts, and its real publisher."""

    def __init__(self, index: RedisPrefixIndex, worker_id: str, first_number: int) -> None:
        self.engine = Engine(
            SchedulerConfig(block_size=BLOCK_SIZE, max_model_len=256, host_cache_blocks=HOST_BLOCKS),
            SimulatedRunner(
                vocab_size=50, prefill_tokens_per_second=1e9, step_seconds=0.0, sleep=lambda seconds: None
            ),
            num_blocks=POOL_BLOCKS,
        )
        self.publisher = IndexPublisher(index, record(worker_id), config=QUICK, has_host_cache=True)
        self.num_served = 0
        self._first_number = first_number

    @property
    def num_held(self) -> int:
        return num_entries(self.publisher.state())

    async def serve(self, num_prompts: int) -> None:
        for _ in range(num_prompts // PROMPTS_A_STEP):
            for _ in range(PROMPTS_A_STEP):
                self._submit_a_new_prompt()
            while self.engine.has_work:
                changes = self.engine.step().changes
                self.publisher.record(*changes[:4])
            await asyncio.sleep(0)

    def _submit_a_new_prompt(self) -> None:
        number = self._first_number + self.num_served
        self.num_served += 1
        tokens = [number % 50, number // 50 % 50, number // 2500, *[7] * (PROMPT_BLOCKS * BLOCK_SIZE - 3)]
        names = chain_names(ROOT, tokens, BLOCK_SIZE)
        self.engine.submit(
            EngineRequest(
                token_ids=tokens,
                prompt_length=len(tokens),
                names=[BlockName(name) for name in (ROOT, *names)],
                sampling=SamplingParams(max_tokens=2),
            )
        )


@contextlib.asynccontextmanager
async def private_index(folder: Path) -> AsyncIterator[tuple[Redis, RedisPrefixIndex]]:
    process = start_private_redis(folder)
    try:
        async with connect(process.url, timeout_seconds=5.0) as client:
            yield client, RedisPrefixIndex(client, "churn")
    finally:
        process.stop()


async def used_bytes(client: Redis) -> int:
    return int((await client.info("memory"))["used_memory"])


async def until_names_are(index: RedisPrefixIndex, num_names: int) -> None:
    async with asyncio.timeout(20):
        while True:
            if (await index.info()).names == num_names:
                return
            await asyncio.sleep(0.02)


async def test_thousands_of_new_prefixes_leave_no_more_names_than_the_caches_hold(tmp_path: Path) -> None:
    async with private_index(tmp_path) as (client, index), asyncio.TaskGroup() as tasks:
        workers = [ChurningWorker(index, f"w{number}", number * 100_000) for number in range(2)]
        running = [tasks.create_task(worker.publisher.run()) for worker in workers]
        most_names, settled_bytes = 0, 0
        for chunk in range(30):
            for worker in workers:
                await worker.serve(100)
                await asyncio.sleep(0.005)
            most_names = max(most_names, (await index.info()).names)
            if chunk == 5:
                settled_bytes = await used_bytes(client)
        grown_bytes = await used_bytes(client) - settled_bytes
        num_stored = sum(worker.num_served for worker in workers) * PROMPT_BLOCKS
        print(f"\n{num_stored:,} names passed, {most_names} at most at once, Redis grew by {grown_bytes:,} B")
        assert most_names <= len(workers) * (POOL_BLOCKS + HOST_BLOCKS)
        assert grown_bytes < 150_000, "what passed would take 20 B a name"
        assert num_stored * 20 > 3 * 150_000
        await until_names_are(index, sum(worker.num_held for worker in workers))
        running[0].cancel()
        await until_names_are(index, workers[1].num_held)
        info = await index.info()
        assert (info.live_berths, info.dead_berths) == (2, 0)
        running[1].cancel()
