"""CPU of one placement by the number of workers and of holders, in the router and in Redis.

    python -m bench.router.scale                     # all sizes, one line each
    python -m bench.router.scale --workers 64 1000   # some sizes
    python -m bench.router.scale --links             # with measured links

Runs the product's Placer, PrefixLookup and RedisPrefixIndex over a private Redis. The workers are registered and have
reported a load, but none runs. A prompt has 450 blocks. Times are CPU milliseconds of this process, and microseconds
that Redis counts for its scripts (`INFO commandstats`). Each is the least mean of BATCHES, since other processes of the
machine only add to it. Prints the figures and keeps nothing.
"""

import argparse
import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.index.contract import Batch
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.dispatch.placer import Placer
from blockyard.router.dispatch.prefix_lookup import PrefixLookup, PrefixLookupConfig
from redis.asyncio import Redis

from bench.router.placement import BLOCK_SIZE, LEASE_SECONDS, make_fleet, record_of

SIZES = (2, 64, 256, 1000)
BLOCKS = 450
SHARED_BLOCKS = 375
FEW = 8
BATCHES = 20
BATCH_CALLS = 20
IN_FLIGHT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt, by how much of it each worker holds."""

    name: str
    depth: Callable[[int, int], int]
    """Returns the leading blocks that a worker holds, by its number and the number of workers."""


CASES = (
    Case(name="few holders", depth=lambda number, _: SHARED_BLOCKS if number < FEW else 0),
    Case(name="all hold it", depth=lambda number, _: SHARED_BLOCKS),
    Case(name="all, 4 depths", depth=lambda number, _: (120, 200, 310, SHARED_BLOCKS)[number % 4]),
    Case(name="all, any depth", depth=lambda number, size: 1 + number * (BLOCKS - 1) // size),
)


async def measure(workers: int, case: Case, seed: int, *, links: bool) -> str:
    random = Random(seed)
    names = [random.randbytes(16) for _ in range(BLOCKS)]
    async with _index() as (client, index):
        fleet = make_fleet(workers)
        for number in range(workers):
            _report(fleet, random, number, links=links)
            berth = await index.register(record_of(number), lease_seconds=LEASE_SECONDS)
            held = tuple(names[: case.depth(number, workers)])
            await index.apply(berth, Batch(sequence=1, added=held))
        lookup = PrefixLookup(index, config=PrefixLookupConfig(timeout_seconds=2.0))
        placer = Placer(fleet, lookup, policy="prefix", no_worker_seconds=5.0)
        in_flight: deque[Placed] = deque()
        for _ in range(2 * IN_FLIGHT):
            await _place(placer, names, in_flight)
        router_ms, redis_us = [], []
        for _ in range(BATCHES):
            await client.config_resetstat()
            started = time.process_time()
            for _ in range(BATCH_CALLS):
                await _place(placer, names, in_flight)
            router_ms.append(1000 * (time.process_time() - started) / BATCH_CALLS)
            stats: dict[str, Any] = await client.info("commandstats")
            redis_us.append(stats["cmdstat_evalsha"]["usec_per_call"])
        errors = sum(lookup.errors.values())
    return f"{workers:>8} {case.name:<16} {min(router_ms):>10.2f} {min(redis_us):>10.0f} {errors:>8}"


async def _place(placer: Placer, names: Sequence[bytes], in_flight: deque[Placed]) -> None:
    placed = await placer.place(names, BLOCKS * BLOCK_SIZE + 7, placer.ticket())
    placer.started(placed)
    in_flight.append(placed)
    if len(in_flight) > IN_FLIGHT:
        placer.ended(in_flight.popleft())


def _report(fleet: Fleet, random: Random, number: int, *, links: bool) -> None:
    load = cluster_pb2.WorkerLoad(
        running=random.randrange(8),
        queued_prefill_tokens=random.randrange(20_000),
        context_tokens=random.randrange(20_000),
        used_blocks=random.randrange(20_000),
        prefill_tokens_per_second=random.uniform(40_000, 60_000),
        decode_tokens_per_second=2_000,
        host_tokens_per_second=500_000 if links else 0,
        pull_setup_seconds=random.uniform(0.001, 0.003) if links else 0,
        pull_bytes_per_second=random.uniform(1e9, 4e9) if links else 0,
    )
    fleet.heard(str(number), load)


@asynccontextmanager
async def _index() -> AsyncIterator[tuple[Redis, RedisPrefixIndex]]:
    with TemporaryDirectory() as folder:
        redis = start_private_redis(Path(folder))
        try:
            async with connect(redis.url, timeout_seconds=5.0) as client:
                yield client, RedisPrefixIndex(client, "bench")
        finally:
            redis.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=SIZES, help="numbers of workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--links", action="store_true", help="every worker may pull from every other one")
    arguments = parser.parse_args()
    print(f"{'workers':>8} {'prompt':<16} {'router ms':>10} {'Redis us':>10} {'errors':>8}", flush=True)
    for workers in arguments.workers:
        for case in CASES:
            print(asyncio.run(measure(workers, case, arguments.seed, links=arguments.links)), flush=True)


if __name__ == "__main__":
    main()
