"""Three simulated workers and a router whose Redis is behind a chaos proxy.

Owns that cluster, and the comparison of the index with the workers' actual blocks. Does not own traffic and the course
of a fault (redis_course.py) or the faults.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis as redis_client
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.schema import key_prefix
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient

from tests.system.load import until
from tests.system.processes import SECRET, SIMULATED, Process, Processes, processes

from .chaos_proxy import ChaosProxyThread

EXACT = cluster_pb2.INDEX_STATE_EXACT
DEGRADED = cluster_pb2.INDEX_STATE_DEGRADED
WORKER_OPTIONS = (*SIMULATED, "--simulated-prefill-tokens-per-second", "200000")
TESTS_USER = "tests"
NUM_WORKERS = 3
REBUILD_SECONDS = 5.0
"""Bound from Redis's return to an index that equals the truth. Tests allow ten times it."""
_PAUSES = re.compile(r"longest pause ([\d.]+) ms, computing ([\d.]+) ms of it; \d+ tasks")

Holding = dict[str, set[bytes]]
"""First 8 bytes of each block name, by worker."""


class RedisServer:
    """A private Redis through several incarnations on one port, with the password that the cluster's clients have."""

    def __init__(self, folder: Path, executable: Path | None = None) -> None:
        self._folder, self._executable = folder, executable
        self.process: RedisProcess = start_private_redis(folder, password=SECRET, executable=executable)
        self._admit_tests()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.process.port}"

    @contextmanager
    def client(self) -> Iterator["redis_client.Redis"]:
        """Connect to Redis directly, not through the proxy, as a user that no fault shuts out."""
        with redis_client.Redis(
            port=self.process.port, username=TESTS_USER, password=SECRET, socket_timeout=10.0
        ) as client:
            yield client

    def run(self, *command: str | int) -> Any:
        with self.client() as client:
            return client.execute_command(*command)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.stop()

    def start(self) -> None:
        self.process = start_private_redis(
            self._folder, password=SECRET, port=self.process.port, executable=self._executable
        )
        self._admit_tests()

    def end_connections(self) -> None:
        """Close the connections of all other clients. They reconnect and log in again."""
        self.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def mend(self) -> None:
        """Make Redis run and answer, whatever a test left."""
        try:
            self.signal(signal.SIGCONT)
            self.run("PING")
        except (OSError, redis_client.RedisError):
            self.process.stop()
            self.start()

    def _admit_tests(self) -> None:
        with redis_client.Redis.from_url(self.process.url) as client:
            client.acl_setuser(
                TESTS_USER, enabled=True, passwords=[f"+{SECRET}"], keys=["*"], categories=["+@all"]
            )


@dataclass(slots=True, kw_only=True)
class RedisCluster:
    """A cluster whose clients reach Redis only through the proxy. The tests connect directly."""

    processes: Processes
    redis: RedisServer
    proxy: ChaosProxyThread
    router: Process
    workers: tuple[Process, ...]
    name: str = "default"
    others: tuple[RedisServer, ...] = ()
    """Further servers that share the prefixes. No proxy stands before them."""

    @property
    def prefix(self) -> str:
        return key_prefix(self.name)

    def parts(self) -> list[tuple[RedisServer, str]]:
        """Return each server, and the prefix of its keys."""
        return [
            (server, key_prefix(self.name, shard)) for shard, server in enumerate((self.redis, *self.others))
        ]

    def client(self) -> AsyncClient:
        return AsyncClient(self.router.address, timeout_seconds=30.0, retries=0)

    async def is_exact(self, client: AsyncClient) -> bool:
        info = await client.cluster_info()
        return info.workers_ready == len(self.workers) and info.index_state == EXACT

    async def until_exact(self, client: AsyncClient, *, resyncs: int = 0) -> float:
        """Return the seconds until the index is EXACT and the workers have republished that many times in all."""
        began = time.monotonic()
        while True:
            info = await client.index_info()
            if await self.is_exact(client) and num_resyncs(info) >= resyncs:
                return time.monotonic() - began
            assert time.monotonic() - began < 10 * REBUILD_SECONDS, f"not EXACT again: {info}"
            await asyncio.sleep(0.05)

    async def truth(self, client: AsyncClient) -> Holding:
        """Return what each worker's cache really holds."""
        return {
            worker.name: {block.name[:8] for block in await client.list_blocks(worker.name) if block.name}
            for worker in self.workers
        }

    async def equals_the_truth(self, client: AsyncClient) -> bool:
        truth = await self.truth(client)
        found: Holding = {}
        try:
            for server, prefix in self.parts():
                with server.client() as straight:
                    for worker, names in indexed(straight, prefix).items():
                        found[worker] = found.get(worker, set()) | names
            return found == truth and await self.truth(client) == truth
        except redis_client.ResponseError:
            # A key of a wrong type, which the purge has not reached yet.
            return False

    async def until_equal(self, client: AsyncClient) -> float:
        """Return the seconds until the index equals the truth. No traffic may run."""
        return await until(
            lambda: self.equals_the_truth(client),
            "the index equals the workers' truth",
            seconds=10 * REBUILD_SECONDS,
            every=0.1,
        )

    def loop_pause(self) -> tuple[float, float]:
        """Return the router's longest loop pause since the last call, and how much of it was computing; in seconds."""
        pause, computing = self.router.loop_word(_PAUSES).groups()
        return float(pause) / 1000, float(computing) / 1000

    def num_keys(self) -> int:
        """Count the keys except buckets. The number of buckets depends on the block names."""
        num_keys = 0
        for server, _ in self.parts():
            with server.client() as straight:
                num_keys += sum(1 for key in straight.scan_iter(count=1000) if b":b:" not in key)
        return num_keys

    def num_strays(self) -> int:
        num_strays = 0
        for server, prefix in self.parts():
            with server.client() as straight:
                num_strays += strays(straight, prefix)
        return num_strays


def indexed(straight: "redis_client.Redis", prefix: str) -> Holding:
    """Return what look-ups can see, read from the raw keys. A worker that is registered twice appears under both
    names."""
    milliseconds = _now_ms(straight)
    live = [int(berth) for berth in straight.zrangebyscore(f"{prefix}leases", f"({milliseconds}", "+inf")]
    names = {int(berth): identity for berth, identity in straight.hgetall(f"{prefix}names").items()}
    owner = {berth: names[berth].split(b"\0")[0].decode() for berth in live if berth in names}
    holding: Holding = {worker: set() for worker in owner.values()}
    if len(holding) < len(owner):
        # After a lost identity a worker is registered twice until the earlier berth's lease lapses.
        holding["of a worker that stands there twice"] = set()
    for name, berths in entries(straight, prefix):
        for berth in berths:
            if berth in owner:
                holding[owner[berth]].add(name)
    return holding


def entries(straight: "redis_client.Redis", prefix: str) -> Iterator[tuple[bytes, list[int]]]:
    for key in straight.scan_iter(match=f"{prefix}b:*", count=1000):
        bucket = int(key.rpartition(b":")[2], 16)
        for part, value in straight.hgetall(key).items():
            berths = [int.from_bytes(value[at : at + 2], "little") for at in range(0, len(value), 2)]
            yield bytes([bucket >> 4]) + part, berths


def strays(straight: "redis_client.Redis", prefix: str) -> int:
    """Count the entries of berths that are not in the index (any more)."""
    milliseconds = _now_ms(straight)
    live = {int(berth) for berth in straight.zrangebyscore(f"{prefix}leases", f"({milliseconds}", "+inf")}
    live &= {int(berth) for berth in straight.hkeys(f"{prefix}names")}
    return sum(1 for _, berths in entries(straight, prefix) for berth in berths if berth not in live)


def _now_ms(straight: "redis_client.Redis") -> int:
    seconds, microseconds = straight.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def num_resyncs(info: cluster_pb2.IndexInfo) -> int:
    return sum(worker.index.resyncs for worker in info.workers)


def num_errors(info: cluster_pb2.IndexInfo) -> int:
    """Return the number of failed calls of all workers."""
    return sum(worker.index.errors for worker in info.workers)


@contextmanager
def redis_cluster_in(
    folder: Path,
    executable: Path | None = None,
    *,
    given: tuple[RedisServer, str] | None = None,
    num_others: int = 0,
) -> Iterator[RedisCluster]:
    """`given`: a server that runs, and the URL by which clients find it without the proxy."""
    redis, own_url = given or (RedisServer(folder / "redis", executable), "")
    others = tuple(RedisServer(folder / f"shard-{number}", executable) for number in range(num_others))
    try:
        with ChaosProxyThread(redis.address) as proxy, processes(folder) as started:
            urls = [own_url or f"redis://:{SECRET}@{proxy.address}/0"]
            urls += [f"redis://:{SECRET}@{other.address}/0" for other in others]
            workers = tuple(
                started.add_worker(f"w{number}", *WORKER_OPTIONS) for number in range(NUM_WORKERS)
            )
            router = started.add_router("router")
            for process in (*workers, router):
                process.environment["BLOCKYARD_REDIS_URL"] = ",".join(urls)
            started.start(*workers, router)
            cluster = RedisCluster(
                processes=started, redis=redis, proxy=proxy, router=router, workers=workers, others=others
            )
            yield cluster
            redis = cluster.redis
    finally:
        for server in (redis, *others):
            server.mend()
            server.process.stop()
