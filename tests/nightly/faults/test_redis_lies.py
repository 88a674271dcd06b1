"""Redis holds entries that were never published, or lacks published ones: rows 42, 43 and 51 of the fault matrix.

A request that was promised too much recomputes it. Each worker finds the damage when it renews its lease, and
republishes all blocks. Every row asserts what redis_course.survives asserts.
"""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from blockyard.proto.index.schema import pack_berths
from blockyard.proto.v1 import cluster_pb2

from .invariants import MAX_MORE_BYTES, Usage
from .redis_course import survives
from .redis_rig import RedisCluster

FOREIGN_BERTH = 4711
REFUSED_SECONDS = 30.0
"""Bound within which a router finds forged records. It reads the directory each second."""


def overwrite_values(cluster: RedisCluster) -> None:
    """Overwrite every bucket with rubbish of each kind."""
    seeded = random.Random(7)
    with cluster.redis.client() as straight:
        for key in straight.scan_iter(match=f"{cluster.prefix}b:*", count=1000):
            for name in straight.hkeys(key):
                rubbish = [b"", b"odd", pack_berths([FOREIGN_BERTH]), seeded.randbytes(100_001)]
                straight.hset(key, name, seeded.choice(rubbish))


def forge_holders(cluster: RedisCluster) -> None:
    """Enter every worker as a holder of every block, as if the removals were lost."""
    with cluster.redis.client() as straight:
        live = sorted(int(berth) for berth in straight.zrange(f"{cluster.prefix}leases", 0, -1))
        for key in straight.scan_iter(match=f"{cluster.prefix}b:*", count=1000):
            for name in straight.hkeys(key):
                straight.hset(key, name, pack_berths(live))


def delete_buckets(cluster: RedisCluster) -> None:
    with cluster.redis.client() as straight:
        straight.delete(*straight.scan_iter(match=f"{cluster.prefix}b:*", count=1000))


def change_types(cluster: RedisCluster) -> None:
    with cluster.redis.client() as straight:
        for key in list(straight.scan_iter(match=f"{cluster.prefix}*", count=1000)):
            straight.delete(key)
            straight.set(key, b"not of our making")


def forge_records(cluster: RedisCluster) -> None:
    """Forge the records of the workers, and one of an unknown worker."""
    with cluster.redis.client() as straight:
        forged = {"address": "no.such.host.invalid:1", "worker_id": b"\xff\n" * 5000}
        for berth in map(int, straight.hkeys(f"{cluster.prefix}names")):
            straight.hset(f"{cluster.prefix}berth:{berth}", mapping=forged)
            straight.hset(f"{cluster.prefix}names", str(berth), b"x" * 100_000)
        foreign = {
            "epoch": "1",
            "worker_id": "x" * 10_000,
            "incarnation": "1",
            "address": "?",
            "fingerprint": "",
        }
        straight.hset(f"{cluster.prefix}berth:{FOREIGN_BERTH}", mapping={**foreign, "block_size": "16"})
        straight.zadd(f"{cluster.prefix}leases", {str(FOREIGN_BERTH): 9e15})
        straight.hset(cluster.prefix.replace(":v1:", ":v9:") + "state", "next", "of another version")


SLOW_LIES = (delete_buckets, change_types, forge_records)


@pytest.mark.fault(42)
@pytest.mark.parametrize(
    "lie",
    [overwrite_values, *((lie) for lie in SLOW_LIES)],
    ids=lambda lie: lie.__name__,
)
async def test_what_nobody_told_costs_recomputing_and_is_told_anew(
    lie: Callable[[RedisCluster], None], redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    async with redis_cluster.client() as client:
        before = num_damages(await client.index_info())
    survived = await survives(
        redis_cluster,
        measured,
        harm=lambda: lie(redis_cluster),
        hold_seconds=0.0,
        is_degraded=False,
        resyncs=1,
    )
    assert num_damages(survived.index) > before or lie is change_types
    assert "blockyard.worker.indexing.publisher" in redis_cluster.workers[0].log_text()
    with redis_cluster.redis.client() as straight:
        straight.delete(redis_cluster.prefix.replace(":v1:", ":v9:") + "state")


@pytest.mark.fault(42)
async def test_prefixes_promised_of_everybody_cost_no_request(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    survived = await survives(
        redis_cluster,
        measured,
        harm=lambda: forge_holders(redis_cluster),
        hold_seconds=3.0,
        is_degraded=False,
        heal=lambda: overwrite_values(redis_cluster),
        resyncs=1,
    )
    assert survived.index.stale_blocks > 0, "routers saw that the promises were not kept"


@pytest.mark.fault(43)
async def test_news_lost_and_doubled_on_the_way_leave_no_trace(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    """A batch whose connection dies may be applied or not: it is sent again."""
    proxy, ended = redis_cluster.proxy, threading.Event()
    seeded = random.Random(11)

    def lose_and_double() -> None:
        while not ended.is_set():
            # Upstream alone: the batch is lost. Downstream alone: it is applied, and the answer is lost.
            is_lost = seeded.random() < 0.5
            proxy.black_hole(upstream=is_lost, downstream=not is_lost)
            time.sleep(seeded.uniform(0.0, 0.05))
            proxy.heal()
            time.sleep(seeded.uniform(0.02, 0.3))

    thread = threading.Thread(target=lose_and_double)

    def heal() -> None:
        ended.set()
        thread.join()
        proxy.heal()

    async with redis_cluster.client() as client:
        before = num_damages(await client.index_info())
    try:
        survived = await survives(
            redis_cluster, measured, harm=thread.start, heal=heal, hold_seconds=5.0, is_degraded=False
        )
    finally:
        ended.set()
    assert num_damages(survived.index) == before, (
        "nothing was missing when workers looked whether it was there"
    )


NUM_ROGUES = 3000
FIRST_ROGUE_BERTH = 10_000


class Trap:
    """A listener to which an attacker wants routers to connect. It counts connections."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    def num_connections(self) -> int:
        """Count the connections since the last call. The kernel keeps them until they are accepted here."""
        accepted = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.accept()[0].close()
                accepted += 1
        return accepted


def introduce_rogues(cluster: RedisCluster, address: str) -> None:
    """Write thousands of records as the administrator. All point at one address, with every fact and proof of a real
    one."""
    with cluster.redis.client() as straight, straight.pipeline(transaction=False) as pipe:
        berth = min(int(berth) for berth in straight.hkeys(f"{cluster.prefix}names"))
        real = straight.hgetall(f"{cluster.prefix}berth:{berth}")
        for number in range(FIRST_ROGUE_BERTH, FIRST_ROGUE_BERTH + NUM_ROGUES):
            worker_id, incarnation = f"worker-{number}", f"{number:016x}"
            facts = {b"address": address, b"worker_id": worker_id, b"incarnation": incarnation}
            pipe.hset(f"{cluster.prefix}berth:{number}", mapping=real | facts)
            pipe.hset(f"{cluster.prefix}names", str(number), f"{worker_id}\0{incarnation}")
            pipe.zadd(f"{cluster.prefix}leases", {str(number): 9e15})
        # One record of a real worker that has moved.
        pipe.hset(f"{cluster.prefix}berth:{FIRST_ROGUE_BERTH}", mapping=real | {b"address": address})
        pipe.execute()


def expel_rogues(cluster: RedisCluster) -> None:
    with cluster.redis.client() as straight, straight.pipeline(transaction=False) as pipe:
        for number in range(FIRST_ROGUE_BERTH, FIRST_ROGUE_BERTH + NUM_ROGUES):
            pipe.delete(f"{cluster.prefix}berth:{number}")
            pipe.hdel(f"{cluster.prefix}names", str(number))
            pipe.zrem(f"{cluster.prefix}leases", str(number))
        pipe.execute()


@pytest.mark.fault(51)
async def test_workers_that_an_attacker_introduces_get_no_connection(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    trap, router = Trap(), redis_cluster.router

    def introduce_and_wait() -> None:
        introduce_rogues(redis_cluster, trap.address)
        deadline = time.monotonic() + REFUSED_SECONDS
        while "not signed by this cluster" not in router.log_text():
            assert time.monotonic() < deadline, "the router did not refuse them"
            time.sleep(0.1)

    resident_bytes = Usage.of(redis_cluster.router.pid).resident_bytes
    await survives(
        redis_cluster,
        measured,
        harm=introduce_and_wait,
        hold_seconds=3.0,
        is_degraded=False,
        heal=lambda: expel_rogues(redis_cluster),
    )
    assert trap.num_connections() == 0, "not even to ask who is there"
    assert Usage.of(redis_cluster.router.pid).resident_bytes - resident_bytes < MAX_MORE_BYTES


def num_damages(info: cluster_pb2.IndexInfo) -> int:
    return sum(worker.index.damages for worker in info.workers)
