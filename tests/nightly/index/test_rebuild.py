"""Redis loses its memory under load: the state shows it, and is soon EXACT again, with an index equal to the truth."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.contract import (
    Incarnation,
    PrefixIndex,
    PrefixIndexError,
    WorkerId,
)
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.v1.cluster_pb2 import IndexState
from blockyard.router.dispatch.index_report import Part, index_condition
from blockyard.router.dispatch.prefix_lookup import IndexHealth
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import index_message
from redis.asyncio import Redis

from tests.unit.index.harness import chain, record
from tests.unit.index.truth import ALL_CHAINS, Tiers, brute_force, name_of

REBUILD_SECONDS = 5.0
"""From the moment that Redis answers again; tests allow ten times it."""
NUM_WORKERS = 4
LONG_PREFIX_BLOCKS = 1500
"""Length of each worker's fixed prefix beside its small changing cache: three batches."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """A real publisher with its defaults, and what it truly holds."""

    worker_id: str
    publisher: IndexPublisher
    chooser: random.Random
    tiers: Tiers
    is_busy: bool = True

    async def work(self) -> None:
        prefix = chain(LONG_PREFIX_BLOCKS, self.worker_id)
        self.publisher.record(prefix, (), prefix if self.tiers.has_host_cache else (), ())
        while self.is_busy:
            for step in self.tiers.seeded_change(self.chooser.randrange(2**32)):
                self.publisher.record(*step.names)
            await asyncio.sleep(self.chooser.choice([0, 0.002, 0.01]))


@dataclass(slots=True, kw_only=True)
class Cluster:
    workers: list[Worker]
    seen: list[IndexState] = field(default_factory=list)
    """Each state that a router would have shown, once in a row."""

    def state(self) -> IndexState:
        """Return the index state that follows from the workers' own reports."""
        parts = [
            Part(
                worker_id=WorkerId(worker.worker_id),
                incarnation=Incarnation("1"),
                index=index_message(worker.publisher.state()),
            )
            for worker in self.workers
        ]
        standing = frozenset((part.worker_id, part.incarnation) for part in parts)
        health = IndexHealth(answers=True, in_time=True, standing=standing)
        return index_condition(health, parts, timeout_seconds=0.04).state

    async def watch(self) -> None:
        while True:
            if (state := self.state()) not in self.seen[-1:]:
                self.seen.append(state)
            await asyncio.sleep(0.001)

    async def until_index_equals(self, index: PrefixIndex, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while True:
                if await self.index_equals(index):
                    return
                await asyncio.sleep(0.02)

    async def index_equals(self, index: PrefixIndex) -> bool:
        on_gpu = {(worker.worker_id, "1"): worker.tiers.on_gpu.paths for worker in self.workers}
        anywhere = {
            (worker.worker_id, "1"): {**worker.tiers.anywhere.paths, **worker.tiers.on_gpu.paths}
            for worker in self.workers
        }
        try:
            for path in ALL_CHAINS:
                found = await index.lookup([name_of(path[: depth + 1]) for depth in range(len(path))])
                holders = {(holder.worker_id, holder.incarnation): holder for holder in found}
                if {who: h.depth for who, h in holders.items() if h.depth} != brute_force(on_gpu, path):
                    return False
                found_anywhere = {who: h.depth + h.host_blocks for who, h in holders.items()}
                if found_anywhere != brute_force(anywhere, path):
                    return False
            return await self._long_prefixes_are_there(index)
        except PrefixIndexError:
            # After a restart each idle connection of the pool fails once.
            return False

    async def _long_prefixes_are_there(self, index: PrefixIndex) -> bool:
        for worker in self.workers:
            found = await index.lookup(chain(LONG_PREFIX_BLOCKS, worker.worker_id))
            if [(holder.worker_id, holder.depth) for holder in found] != [
                (worker.worker_id, LONG_PREFIX_BLOCKS)
            ]:
                return False
        return True


@contextlib.asynccontextmanager
async def running_cluster(index: PrefixIndex, seed: int) -> AsyncIterator[Cluster]:
    chooser = random.Random(seed)
    workers = []
    for number in range(NUM_WORKERS):
        tiers = Tiers(has_host_cache=number % 2 == 1)
        publisher = IndexPublisher(index, record(f"w{number}"), has_host_cache=tiers.has_host_cache)
        own = random.Random(chooser.randrange(2**32))
        workers.append(Worker(worker_id=f"w{number}", publisher=publisher, chooser=own, tiers=tiers))
    cluster = Cluster(workers=workers)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(worker.publisher.run()) for worker in workers]
        running += [tasks.create_task(worker.work()) for worker in workers]
        running.append(tasks.create_task(cluster.watch()))
        try:
            yield cluster
        finally:
            for task in running:
                task.cancel()


async def until(holds: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while True:
            if holds():
                return
            await asyncio.sleep(0.005)


async def flush(process: RedisProcess, client: Redis) -> RedisProcess:
    await client.flushall()
    return process


async def restart(process: RedisProcess, client: Redis) -> RedisProcess:
    """Killed, and back after a while with what its folder has: nothing, or an older state."""
    await asyncio.to_thread(process.stop)
    await asyncio.sleep(0.3)
    return await asyncio.to_thread(start_private_redis, process.log_path.parent, port=process.port)


async def go_back_in_time(process: RedisProcess, client: Redis) -> RedisProcess:
    """A replica that lags takes over: what it knows was true once, epochs and berths too."""
    await client.save()
    await asyncio.sleep(0.3)
    return await restart(process, client)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("trouble", [flush, restart, go_back_in_time])
async def test_the_index_is_degraded_then_exact_and_equals_the_truth(
    trouble: Callable[[RedisProcess, Redis], Awaitable[RedisProcess]], tmp_path: Path
) -> None:
    process = start_private_redis(tmp_path)
    try:
        async with connect(process.url, timeout_seconds=1.0) as client:
            index = RedisPrefixIndex(client, "rebuild")
            async with running_cluster(index, seed=7) as cluster:
                await until(lambda: cluster.state() is IndexState.INDEX_STATE_EXACT, seconds=20)
                await asyncio.sleep(0.2)
                cluster.seen.clear()
                process = await trouble(process, client)
                answered_at = time.monotonic()
                await until(lambda: IndexState.INDEX_STATE_DEGRADED in cluster.seen, 10 * REBUILD_SECONDS)
                await until(lambda: cluster.state() is IndexState.INDEX_STATE_EXACT, 10 * REBUILD_SECONDS)
                print(f"\n{trouble.__name__}: exact again after {time.monotonic() - answered_at:.2f} s")
                for worker in cluster.workers:
                    worker.is_busy = False
                await cluster.until_index_equals(index, 10 * REBUILD_SECONDS)
                assert sum(worker.publisher.state().num_resyncs for worker in cluster.workers) >= NUM_WORKERS
    finally:
        process.stop()
