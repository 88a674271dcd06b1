"""Names, workers and writers for bench/index/__main__.py: the load of a cluster on RedisPrefixIndex's public API.

Names are random bytes, like those of sha256. Each worker has a series of chains, root first.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from blockyard.proto.index import schema as index_schema
from blockyard.proto.index.contract import (
    FIRST_SEQUENCE,
    MAX_BATCH_NAMES,
    ApplyResult,
    Batch,
    Berth,
    Incarnation,
    WorkerId,
    WorkerRecord,
)
from blockyard.proto.index.redis import RedisPrefixIndex
from redis.asyncio import Redis

CLUSTER = "bench"
PROMPT_BLOCKS = 450
CACHED_BLOCKS = 375
LEASE_SECONDS = 3600.0
PROBE_SEED = 7
"""Seed of the chain that bench/index/probe.py looks up while others write."""

Names = tuple[bytes, ...]


def make_names(seed: int, count: int) -> Names:
    raw = random.Random(seed).randbytes(16 * count)
    return tuple(raw[first : first + 16] for first in range(0, len(raw), 16))


def prompt_of(cached: Names, seed: int) -> Names:
    """Return the block names of a prompt: the cached ones, followed by names that no worker holds."""
    return (*cached, *make_names(seed + 1_000_000, PROMPT_BLOCKS - len(cached)))


def worker_record(number: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id=WorkerId(f"worker-{number}"),
        incarnation=Incarnation(f"{number:016x}"),
        address=f"10.0.{number // 250}.{number % 250 + 1}:7000",
        fingerprint="ab" * 16,
        block_size=16,
    )


@dataclass(slots=True, kw_only=True)
class Writer:
    """Writer for one worker's berth, with one batch in flight, like IndexPublisher."""

    index: RedisPrefixIndex
    berth: Berth
    sequence: int = FIRST_SEQUENCE - 1
    pause_per_call: float = 0.0
    """Pause after each batch, as a multiple of the batch's duration."""

    @classmethod
    async def register(
        cls, index: RedisPrefixIndex, number: int, *, has_host_cache: bool = False
    ) -> "Writer":
        berth = await index.register(
            worker_record(number), lease_seconds=LEASE_SECONDS, has_host_cache=has_host_cache
        )
        return cls(index=index, berth=berth)

    async def add(self, names: Names, anywhere: Names = ()) -> None:
        for first in range(0, len(names), MAX_BATCH_NAMES):
            await self._apply(added=names[first : first + MAX_BATCH_NAMES])
        for first in range(0, len(anywhere), MAX_BATCH_NAMES):
            await self._apply(anywhere_added=anywhere[first : first + MAX_BATCH_NAMES])

    async def remove(self, names: Names) -> None:
        """Remove names, leaf first."""
        leaf_first = names[::-1]
        for first in range(0, len(names), MAX_BATCH_NAMES):
            await self._apply(removed=leaf_first[first : first + MAX_BATCH_NAMES])

    async def _apply(self, **names: Names) -> None:
        self.sequence += 1
        began = time.perf_counter()
        result = await self.index.apply(self.berth, Batch(sequence=self.sequence, **names))
        assert result is ApplyResult.OK, result
        if self.pause_per_call:
            await asyncio.sleep(self.pause_per_call * (time.perf_counter() - began))


async def register_all(index: RedisPrefixIndex, count: int, *, first: int = 0) -> list[Writer]:
    return [await Writer.register(index, number) for number in range(first, first + count)]


async def add_all(writers: Sequence[Writer], names_of_each: Sequence[Names]) -> None:
    """Add the names of all workers concurrently, as workers do when Redis is empty."""
    async with asyncio.TaskGroup() as group:
        for writer, names in zip(writers, names_of_each, strict=True):
            group.create_task(writer.add(names))


async def die_and_purge(index: RedisPrefixIndex, writers: Sequence[Writer]) -> tuple[int, int]:
    """Retire the writers, and purge until their berths are free. Return the numbers of changed entries and slices."""
    for writer in writers:
        await index.retire(writer.berth)
    changed = slices = freed = 0
    while True:
        progress = await index.purge()
        changed, slices, freed = changed + progress.changed_entries, slices + 1, freed + len(progress.freed)
        if not progress.active:
            assert freed == len(writers), f"{freed} of {len(writers)} berths were freed"
            return changed, slices


async def num_names(client: Redis) -> int:
    """Return the number of names in all buckets, of any worker."""
    pipeline = client.pipeline(transaction=False)
    for bucket in range(index_schema.NUM_BUCKETS):
        pipeline.hlen(f"{index_schema.key_prefix(CLUSTER)}b:{bucket:03x}")
    return sum(await pipeline.execute())


async def warm_up(client: Redis) -> None:
    """Run each script once, so that Redis has loaded them all before memory is first measured."""
    index = RedisPrefixIndex(client, CLUSTER)
    (writer,) = await register_all(index, 1)
    await writer.add(make_names(0, 4))
    await index.lookup(make_names(0, 4))
    await index.renew(writer.berth, lease_seconds=LEASE_SECONDS)
    await die_and_purge(index, [writer])
    await client.flushall()
