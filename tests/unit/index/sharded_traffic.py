"""A real engine whose publishers tell several servers, of which some are dark, and look-ups on all of them."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from blockyard.proto.index.contract import Incarnation, PrefixIndex, WorkerId
from blockyard.router.dispatch.prefix_lookup import (
    PrefixLookup,
    PrefixLookupConfig,
)
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import is_exact
from blockyard.worker.indexing.sharded_publisher import ShardedPublisher
from blockyard.worker.indexing.state import PublisherConfig

from .harness import UnreliableIndex, record
from .traffic import make_engine, names_of, random_prompts, request, rounded_depth

KNOWN = {WorkerId("w0"): Incarnation("1")}


PATIENT = PrefixLookupConfig(timeout_seconds=5.0, open_seconds=0.05, refresh_seconds=0.0)


QUICK = PublisherConfig(
    lease_seconds=0.9,
    flush_seconds=0.001,
    purge_seconds=0.02,
    resync_jitter_seconds=0.002,
    first_backoff_seconds=0.002,
    max_backoff_seconds=0.02,
    call_timeout_seconds=1.0,
)


class TrueWorker:
    """The real engine over a small pool, and its publishers, one for each server."""

    def __init__(self, shards: Sequence[PrefixIndex], stride_blocks: int, *, host_cache_blocks: int) -> None:
        self.engine = make_engine(40, stride_blocks, host_cache_blocks)
        self.stride_blocks = stride_blocks
        has_host_cache = host_cache_blocks > 0
        self.publisher = ShardedPublisher(
            [
                IndexPublisher(shard, record(), config=QUICK, has_host_cache=has_host_cache)
                for shard in shards
            ],
            has_host_cache=has_host_cache,
        )

    def serve(self, tokens: list[int], names: Iterable[bytes], num_steps: int) -> None:
        self.engine.submit(request(tokens, names))
        for _ in range(num_steps):
            self.publisher.record(self.engine.step().changes)

    async def until_exact(self, shards: Iterable[int]) -> None:
        """Wait until these servers know all changes."""
        async with asyncio.timeout(30):
            while True:
                states = self.publisher.states()
                if all(is_exact(states[shard]) and not states[shard].num_pending for shard in shards):
                    return
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running(publisher: ShardedPublisher) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        try:
            yield
        finally:
            await publisher.close()


class Darkness:
    """Servers that can be made dark one by one."""

    def __init__(self, indexes: Sequence[PrefixIndex]) -> None:
        self.dark: set[int] = set()
        self.shards: list[Any] = [
            UnreliableIndex(index, lambda name, shard=shard: self._fate(shard))
            for shard, index in enumerate(indexes)
        ]

    def _fate(self, shard: int) -> str:
        return "lose_request" if shard in self.dark else "deliver"


async def check_random_traffic(indexes: Sequence[PrefixIndex], stride_blocks: int, seed: int) -> None:
    """Look-ups equal the engine's caches, also of the prefixes on other servers while one is dark."""
    chooser, num_shards = random.Random(seed), len(indexes)
    darkness = Darkness(indexes)
    worker = TrueWorker(darkness.shards, stride_blocks, host_cache_blocks=9 if seed % 2 else 0)
    lookup = PrefixLookup(*darkness.shards, config=PATIENT)
    prompts = random_prompts(chooser, 8, 16)
    all_names = [names_of(tokens) for tokens in prompts]
    found_on, unanswered = Counter[int](), 0
    async with running(worker.publisher):
        await worker.until_exact(range(num_shards))
        for number in range(24):
            if number % 4 == 0:
                darkness.dark = {chooser.randrange(num_shards)} if number % 8 else set()
            bright = [shard for shard in range(num_shards) if shard not in darkness.dark]
            which = chooser.randrange(len(prompts))
            worker.serve(prompts[which], all_names[which], chooser.randint(0, 40))
            await worker.until_exact(bright)
            for names in chooser.sample(all_names, 6):
                shard = lookup.shard_of(names, stride_blocks)
                found = await lookup.lookup(names, KNOWN, stride_blocks=stride_blocks)
                while shard in bright and not found.available:  # until the probe
                    await asyncio.sleep(0.01)
                    found = await lookup.lookup(names, KNOWN, stride_blocks=stride_blocks)
                if shard in darkness.dark and len(names) >= stride_blocks:
                    assert not found.available
                    unanswered += 1
                elif shard in bright:
                    assert found.depth_by_worker.get(WorkerId("w0")) == rounded_depth(
                        worker.engine, stride_blocks, names
                    )
                    found_on[shard] += bool(found.depth_by_worker)
        darkness.dark = set()
        await worker.until_exact(range(num_shards))
        tiers = [publisher._difference for publisher in worker.publisher._publishers]
        held = [tier.anywhere.held if seed % 2 else tier.on_gpu.held for tier in tiers]
        assert worker.publisher._shards.keys() == set().union(*held), "it forgets the names that are gone"
    assert len(found_on) == num_shards, "this traffic shows nothing"
    assert unanswered, "no prefix was on the dark server"
