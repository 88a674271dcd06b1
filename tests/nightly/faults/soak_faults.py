"""The faults of the soak: drawn from a seed, committed one at a time, and healed.

Owns the list of faults, their order and how each is done. Does not own what must hold afterwards (soak_cluster.py,
soak_load.py).
"""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import grpc
from blockyard.router.client import AsyncClient
from blockyard.router.client.errors import BlockyardError

from tests.system.load import load, streams, until

from .chaos_proxy import ChaosProxy
from .soak_cluster import MARKER_TOKEN, MORTAL_ROUTER, MORTAL_WORKER, ROUTERS, WORKERS, SoakCluster
from .soak_load import RouterDeath, SoakLoad

WORKER_KILLED = "worker SIGKILL, started again"
GONE_SECONDS = 60.0
"""Four times the keepalive interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `seconds`: from the harm to its end."""

    kind: str
    target: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} {self.target} {self.seconds:.1f} s"


Commit = Callable[[SoakCluster, SoakLoad, Fault], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    commit: Commit
    targets: tuple[str, ...]
    seconds: tuple[float, float]


def drawn(seed: int) -> Iterator[Fault]:
    """Yield faults without end, the same for the same seed: all kinds in one order, then all in another, and so on."""
    chance = random.Random(f"{seed}/faults")
    while True:
        for name in chance.sample(sorted(FAULTS), len(FAULTS)):
            kind = FAULTS[name]
            yield Fault(kind=name, target=chance.choice(kind.targets), seconds=chance.uniform(*kind.seconds))


async def commit(cluster: SoakCluster, load: SoakLoad, fault: Fault) -> None:
    """Commit a fault, and return once the harm itself is undone. The cluster may still recover."""
    await FAULTS[fault.kind].commit(cluster, load, fault)


async def _worker_kill(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    worker = cluster.processes.workers[fault.target]
    await asyncio.to_thread(worker.kill)
    await asyncio.sleep(fault.seconds)
    await asyncio.to_thread(cluster.processes.start, worker)


async def _worker_freeze(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    worker = cluster.processes.workers[fault.target]
    worker.signal(signal.SIGSTOP)
    await asyncio.sleep(fault.seconds)
    worker.signal(signal.SIGCONT)


async def _drain(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    client = cluster.clients[ROUTERS[0]]
    await client.drain_worker(fault.target, grace_seconds=fault.seconds)
    await asyncio.sleep(fault.seconds)
    await client.resume_worker(fault.target)


async def _step_raises(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    tokens = [10 + number for number in range(40)]
    tokens[20] = MARKER_TOKEN
    code = grpc.StatusCode.OK
    try:
        await cluster.clients[fault.target].generate(prompt_token_ids=tokens, max_tokens=4, seed=1)
    except BlockyardError as error:
        code = error.code
    assert code is grpc.StatusCode.INTERNAL, f"a request that fails its step ended with {code.name}"


async def _link_cut(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    await _black_hole(cluster.links[fault.target], fault.seconds)


async def _link_loses_requests(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    await _black_hole(cluster.links[fault.target], fault.seconds, downstream=False)


async def _link_loses_answers(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    await _black_hole(cluster.links[fault.target], fault.seconds, upstream=False)


async def _black_hole(
    link: ChaosProxy, seconds: float, *, upstream: bool = True, downstream: bool = True
) -> None:
    await link.black_hole(upstream, downstream)
    await asyncio.sleep(seconds)
    await link.heal()


async def _link_reset(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    await cluster.links[fault.target].reset()


async def _link_slow(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    link = cluster.links[fault.target]
    await link.latency(0.08, 0.08)
    await link.bandwidth(125_000)
    await asyncio.sleep(fault.seconds)
    await link.heal()


async def _redis_kill(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    redis = cluster.redis.redis
    await cluster.forget_index()
    await asyncio.to_thread(redis.kill)
    await asyncio.sleep(fault.seconds)
    await asyncio.to_thread(redis.start)


async def _redis_freeze(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    redis = cluster.redis.redis
    redis.signal(signal.SIGSTOP)
    await asyncio.sleep(fault.seconds)
    redis.signal(signal.SIGCONT)


async def _redis_flush(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    await cluster.forget_index()
    await asyncio.to_thread(cluster.redis.redis.run, "FLUSHALL")


async def _redis_slow(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    proxy = cluster.redis.proxy
    proxy.latency(0.02, 0.02)
    await asyncio.sleep(fault.seconds)
    proxy.heal()


async def _redis_cut(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    proxy = cluster.redis.proxy
    proxy.black_hole()
    await asyncio.sleep(fault.seconds)
    proxy.heal()


async def _redis_refuses(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    proxy = cluster.redis.proxy
    proxy.refuse()
    await asyncio.sleep(fault.seconds)
    proxy.heal()


async def _router_kill(cluster: SoakCluster, load: SoakLoad, fault: Fault) -> None:
    router = cluster.processes.routers[fault.target]
    death = RouterDeath(address=router.address, at=time.monotonic())
    load.router_deaths.append(death)
    await asyncio.to_thread(router.kill)
    await asyncio.sleep(fault.seconds)
    await asyncio.to_thread(cluster.processes.start, router)
    death.back_at = time.monotonic()


async def _client_vanishes(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    await _lose_a_client(cluster, fault.target, ChaosProxy.black_hole)


async def _client_dies(cluster: SoakCluster, _: SoakLoad, fault: Fault) -> None:
    await _lose_a_client(cluster, fault.target, ChaosProxy.refuse)


async def _lose_a_client(
    cluster: SoakCluster, router: str, lose: Callable[[ChaosProxy], Awaitable[None]]
) -> None:
    """Lose a client. Its router must notice long before the stream would end."""
    address = cluster.processes.routers[router].address
    async with ChaosProxy(address) as proxy, AsyncClient(proxy.address, retries=0) as far:
        (stream,) = streams(1, prefix="lost", max_tokens=1900)
        async with load(far, [stream]) as running:
            await running.until_tokens(3)
            await lose(proxy)

            async def is_gone() -> bool:
                held = await cluster.clients[router].list_requests()
                return all(request.request_id != stream.request_id for request in held)

            await until(is_gone, "the lost client's stream has ended", seconds=GONE_SECONDS, every=0.1)


FAULTS = {
    WORKER_KILLED: FaultKind(commit=_worker_kill, targets=(MORTAL_WORKER,), seconds=(0.0, 2.0)),
    "worker SIGSTOP, SIGCONT": FaultKind(commit=_worker_freeze, targets=WORKERS, seconds=(0.5, 5.0)),
    "worker drained, resumed": FaultKind(commit=_drain, targets=WORKERS, seconds=(0.0, 1.0)),
    "a step raises": FaultKind(commit=_step_raises, targets=ROUTERS, seconds=(0.0, 0.0)),
    "link cut": FaultKind(commit=_link_cut, targets=WORKERS, seconds=(0.5, 5.0)),
    "link loses requests": FaultKind(commit=_link_loses_requests, targets=WORKERS, seconds=(0.5, 5.0)),
    "link loses answers": FaultKind(commit=_link_loses_answers, targets=WORKERS, seconds=(0.5, 5.0)),
    "link reset": FaultKind(commit=_link_reset, targets=WORKERS, seconds=(0.0, 0.0)),
    "link slow": FaultKind(commit=_link_slow, targets=WORKERS, seconds=(1.0, 4.0)),
    "Redis SIGKILL, back empty": FaultKind(commit=_redis_kill, targets=("Redis",), seconds=(0.0, 3.0)),
    "Redis SIGSTOP, SIGCONT": FaultKind(commit=_redis_freeze, targets=("Redis",), seconds=(0.5, 5.0)),
    "Redis FLUSHALL": FaultKind(commit=_redis_flush, targets=("Redis",), seconds=(0.0, 0.0)),
    "Redis slow": FaultKind(commit=_redis_slow, targets=("Redis",), seconds=(1.0, 4.0)),
    "Redis cut": FaultKind(commit=_redis_cut, targets=("Redis",), seconds=(0.5, 4.0)),
    "Redis refuses": FaultKind(commit=_redis_refuses, targets=("Redis",), seconds=(0.5, 4.0)),
    "router SIGKILL, started again": FaultKind(
        commit=_router_kill, targets=(MORTAL_ROUTER,), seconds=(0.0, 2.0)
    ),
    "client vanishes": FaultKind(commit=_client_vanishes, targets=ROUTERS, seconds=(0.0, 0.0)),
    "client dies": FaultKind(commit=_client_dies, targets=ROUTERS, seconds=(0.0, 0.0)),
}
