"""A relay over real links to scripted workers, without the router's own server. In virtual time, links in memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from blockyard.proto.naming.block_hash import chain, pack_tokens
from blockyard.proto.security.tls import session_channels
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import CHANNEL_OPTIONS
from blockyard.router.cluster.worker_view import WorkerState
from blockyard.router.dispatch.placer import Placer
from blockyard.router.dispatch.prefix_lookup import PrefixLookup
from blockyard.router.generation.relay import Generation, Relay

from simulation.calls import Connections, Listener, MemoryChannel
from simulation.network import Network
from simulation.virtual_time import Process, VirtualLoop

from .fake_worker import BLOCK_SIZE, SECRET, FakeWorker

ROOT = b"r" * 16


@dataclass
class Rig:
    fleet: Fleet
    placer: Placer
    relay: Relay
    workers: list[FakeWorker]

    def states(self) -> dict[str, WorkerState]:
        return {worker.address: self.fleet.view.state(worker) for worker in self.fleet.view.workers()}

    def is_undecided(self) -> bool:
        """Whether some link has neither come up nor said why not."""
        connecting = WorkerState.CONNECTING
        view = self.fleet.view
        return any(view.state(worker) is connecting and not worker.reason for worker in view.workers())

    async def until(self, holds: Callable[[], bool], seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110 - what is waited for is state of the product, not an event
                await asyncio.sleep(0.005)

    async def until_quiet(self) -> None:
        """Nothing runs on any worker and the router has nothing booked."""
        view = self.fleet.view
        await self.until(lambda: not any(worker.num_running for worker in self.workers))
        await self.until(lambda: not any(worker.booked for worker in view.workers()))
        view.check_invariants()


@asynccontextmanager
async def rig(
    *workers: FakeWorker,
    lost_seconds: float = 20.0,
    stall_seconds: float = 5.0,
    secret: str = SECRET,
    no_worker_seconds: float = 10.0,
    max_migrations: int = 3,
    lookup: PrefixLookup | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Rig]:
    """`clock` is that of the placer."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        fleet = Fleet(
            tokenizer_fingerprint="tokenizer",
            open_channel=session_channels(None, secret=secret, cluster="default", options=CHANNEL_OPTIONS),
            suspect_seconds=lost_seconds / 2,
            lost_seconds=lost_seconds,
            stall_seconds=stall_seconds,
        )
        placer = Placer(
            fleet, lookup, policy="prefix", rng=Random(0), no_worker_seconds=no_worker_seconds, clock=clock
        )
        made = Rig(fleet, placer, Relay(fleet, placer, max_migrations=max_migrations), list(workers))
        async with _running(made):
            yield made


@asynccontextmanager
async def virtual_rig(worker: FakeWorker) -> AsyncIterator[Rig]:
    """A rig on a VirtualLoop: messages take half a millisecond each way, and computing takes no time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)

    async def session(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[session_pb2.ToRouter]:
        parsed = (session_pb2.ToWorker.FromString(data) async for data in requests)
        async for message in worker.Session(parsed, context):
            yield message

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        session, response_serializer=session_pb2.ToRouter.SerializeToString
    )
    service = grpc.method_handlers_generic_handler("blockyard.v1.EngineService", {"Session": handler})
    worker.address = "worker:1"
    connections, router = Connections(Network(loop, Random(0))), Process("router", loop)
    connections.listeners[worker.address] = Listener(Process("worker", loop), service)
    fleet = Fleet(
        tokenizer_fingerprint="tokenizer",
        open_channel=lambda address: MemoryChannel(connections, router, address),  # type: ignore[arg-type, return-value]
        suspect_seconds=10.0,
        lost_seconds=20.0,
        clock=loop.time,
    )
    placer = Placer(fleet, None, policy="prefix", rng=Random(0), no_worker_seconds=10.0, clock=loop.time)
    made = Rig(fleet, placer, Relay(fleet, placer, max_migrations=3, clock=loop.time), [worker])
    async with _running(made):
        yield made


@asynccontextmanager
async def _running(made: Rig) -> AsyncIterator[None]:
    made.fleet.set_addresses([worker.address for worker in made.workers])
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(made.fleet.run())
        await made.until(
            lambda: len(made.fleet.view.workers()) == len(made.workers) and not made.is_undecided()
        )
        yield
        running.cancel()


def generation(
    seed: int = 1, *, max_tokens: int = 20, prompt_tokens: int = 40, deadline: float | None = None
) -> Generation:
    prompt = pack_tokens(range(seed, seed + prompt_tokens))
    return Generation(
        request_id=f"request-{seed}",
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        block_names=b"".join([ROOT, *chain(ROOT, prompt, BLOCK_SIZE)]),
        sampling=session_pb2.EngineSampling(temperature=0.0, top_p=1.0, max_tokens=max_tokens, seed=seed),
        deadline=time.monotonic() + 30 if deadline is None else deadline,
    )
