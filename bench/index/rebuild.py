"""Time until the index is exact again after Redis has lost everything: FLUSHALL beside workers that publish.

Part of bench/index/__main__.py. The publishers are the product's own (worker/indexing/publisher.py), but all run in
one process. On a real cluster each has its own machine, so this time includes one process's work for all of them.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.proto.index.contract import Holder
from blockyard.proto.index.redis import RedisPrefixIndex
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.state import PublisherConfig, PublisherState
from redis.asyncio import Redis

from bench.index.load import CACHED_BLOCKS, CLUSTER, Names, make_names, num_names, worker_record

DEADLINE_SECONDS = 120.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildScale:
    workers: int = 64
    names_a_worker: int = 15_000
    repeats: int = 3


async def measure_rebuild(client: Redis, scale: RebuildScale) -> dict[str, Any]:
    await client.flushall()
    index = RedisPrefixIndex(client, CLUSTER)
    names = [make_names(5000 + number, scale.names_a_worker) for number in range(scale.workers)]
    publishers = [IndexPublisher(index, worker_record(number)) for number in range(scale.workers)]
    seconds: list[float] = []
    async with asyncio.TaskGroup() as group:
        for publisher, held in zip(publishers, names, strict=True):
            publisher.record(stored=held, removed=())
            group.create_task(publisher.run())
        first = await _until_published(publishers, num_registrations=1)
        for turn in range(scale.repeats):
            await client.flushall()
            seconds.append(await _until_published(publishers, num_registrations=2 + turn))
            await _check(client, index, names)
        for publisher in publishers:
            await publisher.close()
    return {
        "entries": scale.workers * scale.names_a_worker,
        "first_publication_seconds": round(first, 2),
        "seconds_until_exact": [round(value, 2) for value in seconds],
        "of_which_until_noticed_at_most_seconds": PublisherConfig().lease_seconds / 3,
    }


async def _until_published(publishers: Sequence[IndexPublisher], *, num_registrations: int) -> float:
    """Wait until every publisher has registered this often and has nothing left to publish. Return the seconds."""
    started = time.perf_counter()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            states = [publisher.state() for publisher in publishers]
            if all(state.num_resyncs + 1 >= num_registrations and is_exact(state) for state in states):
                return time.perf_counter() - started
            await asyncio.sleep(POLL_SECONDS)


def is_exact(state: PublisherState) -> bool:
    return state.berth is not None and not state.num_pending


async def _check(client: Redis, index: RedisPrefixIndex, names: Sequence[Names]) -> None:
    """Assert that the index is exact: all names exist, and a look-up finds each chain in full, on its worker only."""
    assert await num_names(client) == sum(map(len, names)), "the index has too few or too many names"
    for number, held in enumerate(names):
        for first in range(0, len(held), CACHED_BLOCKS):
            chain = held[first : first + CACHED_BLOCKS]
            found = await index.lookup(chain)
            wanted = worker_record(number)
            assert found == [
                Holder(worker_id=wanted.worker_id, incarnation=wanted.incarnation, depth=len(chain))
            ], f"the look-up of worker {number}'s chain found {found}"
