"""The cluster of the soak: Redis behind a proxy, four workers each behind a proxy of its own, two routers.

Owns its start, the check that it is whole again, what must hold while it is idle, and taking samples. Does not own
faults (soak_faults.py), load (soak_load.py) or the bounds on samples (soak_samples.py).
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import redis as redis_client
from blockyard.router.client import AsyncClient
from blockyard.router.client.errors import BlockyardError

from tests.system.load import until
from tests.system.processes import SECRET, SIMULATED, Processes, processes

from .chaos_proxy import ChaosProxy, ChaosProxyThread
from .invariants import Usage, blocks_are_free, check_pool, nothing_is_told, pool_of
from .redis_rig import RedisCluster, RedisServer, num_resyncs, strays
from .soak_samples import RedisSample, Sample, Samples

MARKER_TOKEN = 3333
"""Marker token: a prompt that contains it makes its step fail."""
WORKERS = ("w0", "w1", "w2", "w3")
MORTAL_WORKER = "w3"
"""Worker that faults may end. The others live through the whole run, so that slopes can be seen."""
ROUTERS = ("r0", "r1")
MORTAL_ROUTER = "r1"
LINK_HOST = "127.0.0.2"
"""Host that workers advertise: each worker's proxy has the worker's port there."""
WORKER_OPTIONS = (
    *SIMULATED,
    *("--simulated-step-seconds", "0.02", "--simulated-fault", f"{MARKER_TOKEN}:raise"),
    *("--advertise-host", LINK_HOST),
)
WHOLE_SECONDS = 90.0
QUIET_SECONDS = 60.0


@dataclass(slots=True, kw_only=True)
class SoakCluster:
    processes: Processes
    redis: RedisCluster
    links: dict[str, ChaosProxy]
    """Links between all routers and a worker, by worker."""
    clients: dict[str, AsyncClient]
    """Clients that read a router's state, by router. The load has its own clients."""
    wanted_resyncs: int = 0
    """Number of times that all workers together must republish before the cluster is whole."""

    @property
    def addresses(self) -> list[str]:
        return [router.address for router in self.processes.routers.values()]

    async def forget_index(self) -> None:
        """Require that every worker republishes all blocks: the fault that follows loses what was published."""
        info = await self.clients[ROUTERS[0]].index_info()
        self.wanted_resyncs = num_resyncs(info) + len(WORKERS)

    async def until_whole(self) -> None:
        """Wait until all processes run, and each router has all workers READY and the index EXACT. Checks I1 as at any
        moment."""
        for name, client in self.clients.items():

            async def is_whole(client: AsyncClient = client) -> bool:
                self._all_run()
                with suppress(BlockyardError):
                    return await self._is_told(client) and await self.redis.is_exact(client)
                return False

            await until(is_whole, f"the cluster is whole to {name}", seconds=WHOLE_SECONDS, every=0.05)
        self.wanted_resyncs = 0
        for worker in self.processes.workers.values():
            check_pool(await pool_of(worker))

    async def until_quiet(self, *, is_last: bool) -> None:
        """Check I1, I5 and I6 without clients. At the last check, no entry of a dead incarnation may be left in the
        index."""
        for name, client in self.clients.items():

            async def is_idle(client: AsyncClient = client) -> bool:
                return not await client.list_requests()

            await until(is_idle, f"no request is left in {name}", seconds=QUIET_SECONDS)
        for worker in self.processes.workers.values():
            await blocks_are_free(worker, seconds=QUIET_SECONDS)
        await self.redis.until_equal(self.clients[ROUTERS[0]])
        if is_last:
            await until(self._has_no_strays, "the dead berths are purged", seconds=QUIET_SECONDS, every=0.2)
        nothing_is_told(self.processes.logs())

    def take(self, samples: Samples, at_seconds: float) -> None:
        """Take a sample of every process, of their child processes, and of this one."""
        for process in (*self.processes.workers.values(), *self.processes.routers.values()):
            sample = Sample(at_seconds=at_seconds, usage=Usage.of(process.pid), tasks=process.num_tasks())
            samples.add(process.name, process.pid, sample)
            for number, pid in enumerate(children(process.pid)):
                sample = Sample(at_seconds=at_seconds, usage=Usage.of(pid))
                samples.add(f"{process.name}, child {number}", pid, sample)
        own = Sample(at_seconds=at_seconds, usage=Usage.of(os.getpid()), tasks=len(asyncio.all_tasks()))
        samples.add("clients", os.getpid(), own)
        with self.redis.redis.client() as straight:
            used_bytes = int(straight.info("memory")["used_memory"])
        samples.redis.append(
            RedisSample(at_seconds=at_seconds, keys=self.redis.num_keys(), used_bytes=used_bytes)
        )

    def _all_run(self) -> None:
        for process in (*self.processes.workers.values(), *self.processes.routers.values()):
            assert process.is_running, f"{process.name} ended by itself:\n{process.log_text()[-2000:]}"

    async def _is_told(self, client: AsyncClient) -> bool:
        return not self.wanted_resyncs or num_resyncs(await client.index_info()) >= self.wanted_resyncs

    def _has_no_strays(self) -> bool:
        with self.redis.redis.client() as straight:
            return strays(straight, self.redis.prefix) == 0


def children(pid: int) -> list[int]:
    """Return the child processes, the oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # Fields after the name, which may contain anything: state, parent.
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
    return sorted(found)


@asynccontextmanager
async def soak_cluster(folder: Path) -> AsyncIterator[SoakCluster]:
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(_redis(folder / "redis"))
        proxy = stack.enter_context(ChaosProxyThread(redis.address))
        started = stack.enter_context(processes(folder))
        workers = tuple(started.add_worker(name, *WORKER_OPTIONS) for name in WORKERS)
        routers = tuple(started.add_router(name) for name in ROUTERS)
        links = {}
        for worker in workers:
            port = worker.address.rpartition(":")[2]
            link = ChaosProxy(worker.address, listen=f"{LINK_HOST}:{port}")
            links[worker.name] = await stack.enter_async_context(link)
        for process in (*workers, *routers):
            process.environment["BLOCKYARD_REDIS_URL"] = f"redis://:{SECRET}@{proxy.address}/0"
        await asyncio.to_thread(started.start, *workers, *routers)
        clients = {
            router.name: await stack.enter_async_context(AsyncClient(router.address)) for router in routers
        }
        yield SoakCluster(
            processes=started,
            redis=RedisCluster(
                processes=started, redis=redis, proxy=proxy, router=routers[0], workers=workers
            ),
            links=links,
            clients=clients,
        )


@contextmanager
def _redis(folder: Path) -> Iterator[RedisServer]:
    """Yield the cluster, and end it in every case."""
    redis = RedisServer(folder)
    try:
        yield redis
    finally:
        with suppress(OSError, redis_client.RedisError):
            redis.mend()
        redis.process.stop()
