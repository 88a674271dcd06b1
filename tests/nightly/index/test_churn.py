"""The worker's pool bounds the index's memory, however many prefixes pass through it."""

import asyncio

from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.state import PublisherConfig

from tests.unit.index.harness import RedisHarness, record
from tests.unit.index.traffic import make_engine, names_of, request

POOL_BLOCKS, HOST_BLOCKS, PROMPT_BLOCKS, NUM_PROMPTS = 256, 64, 8, 3000
QUICK = PublisherConfig(lease_seconds=0.6, flush_seconds=0.002, purge_seconds=0.05, purge_slice_seconds=0.002)


async def test_thousands_of_new_prefixes_leave_no_more_names_than_the_caches_hold(
    redis_harness: RedisHarness,
) -> None:
    engine, index = make_engine(POOL_BLOCKS, 1, HOST_BLOCKS), redis_harness.index
    publisher = IndexPublisher(index, record(), config=QUICK, has_host_cache=True)
    used_bytes: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        for number in range(NUM_PROMPTS):
            tokens = [number % 50, number // 50 % 50, number // 2500, *[7] * (16 * PROMPT_BLOCKS - 3)]
            engine.submit(request(tokens, names_of(tokens)))
            while engine.has_work:
                changes = engine.step().changes
                anywhere = (changes.anywhere_stored, changes.anywhere_removed)
                publisher.record(changes.stored, changes.removed, *anywhere)
            if number % 100 == 99:
                await asyncio.sleep(0.01)
                assert (await index.info()).names <= POOL_BLOCKS + HOST_BLOCKS
                used_bytes.append((await redis_harness.client.info("memory"))["used_memory"])
        assert used_bytes[-1] - used_bytes[5] < 150_000 < NUM_PROMPTS * PROMPT_BLOCKS * 20 / 3, (
            "what passed would take 20 B a name"
        )
        await publisher.close()
