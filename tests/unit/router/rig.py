"""A whole router on a real port, with the demo model's tokenizer and scripted workers."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from blockyard.proto.naming.fingerprint import tokenizer_fingerprint
from blockyard.proto.v1 import cluster_pb2, inference_pb2
from blockyard.proto.v1.cluster_pb2_grpc import ClusterServiceStub
from blockyard.proto.v1.inference_pb2_grpc import InferenceServiceStub
from blockyard.router.config import RouterConfig
from blockyard.router.dispatch import prefix_lookup
from blockyard.router.generation import answer_store
from blockyard.router.server import RouterServer
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from .fake_worker import SECRET, FakeWorker

SOON_LOST = {"suspect_seconds": 0.5, "lost_seconds": 1.0}
"""Settings of a router that gives a silent worker up while a test waits."""
MODEL = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
READY = cluster_pb2.WORKER_STATE_READY
ROUTER = (sys.executable, "-m", "blockyard.router")
"""Begin of the command of a router in a process of its own."""
FOREVER = {"max_tokens": 400, "ignore_eos": True}


def config(**settings: Any) -> RouterConfig:
    return RouterConfig(
        **{
            "model": str(MODEL),
            "model_names": ("demo",),
            "cluster_secret": SECRET,
            # Router, workers and clients share one event loop here, which stands still where the machine is crowded.
            "suspect_seconds": 10.0,
            "lost_seconds": 20.0,
            **settings,
        }
    )


@contextmanager
def waiting_for_redis() -> Iterator[None]:
    """Let what is made meanwhile wait five seconds for Redis, which on a busy machine may take more than 40 ms."""
    patient = partial(prefix_lookup.PrefixLookupConfig, timeout_seconds=5.0)
    with pytest.MonkeyPatch.context() as patch:
        for module in (prefix_lookup, answer_store):
            patch.setattr(module, "PrefixLookupConfig", patient)
        yield


def worker_of_model(worker_id: str, **settings: Any) -> FakeWorker:
    return FakeWorker(worker_id, tokenizer_fingerprint=tokenizer_fingerprint(MODEL), **settings)


@dataclass
class Router:
    """A running router, its stubs, and the workers of the test at hand."""

    server: RouterServer
    address: str
    channel: grpc.aio.Channel
    inference: Any
    cluster: Any

    async def states(self) -> dict[str, int]:
        listed = await self.cluster.ListWorkers(cluster_pb2.ListWorkersRequest())
        return {worker.address: worker.state for worker in listed.workers}

    @asynccontextmanager
    async def workers(self, *workers: FakeWorker) -> AsyncIterator[tuple[FakeWorker, ...]]:
        """Exactly these workers are up for the life of the context."""
        async with AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(worker)
            self.server.set_workers([worker.address for worker in workers])
            await until(lambda: self._are_ready(workers))
            yield workers
            self.server.set_workers([])
        await until(self._has_none)

    async def _are_ready(self, workers: tuple[FakeWorker, ...]) -> bool:
        return await self.states() == {worker.address: READY for worker in workers}

    async def _has_none(self) -> bool:
        return await self.states() == {}

    async def requests(self) -> list[cluster_pb2.RequestInfo]:
        return list((await self.cluster.ListRequests(cluster_pb2.ListRequestsRequest())).requests)


@asynccontextmanager
async def running_router(*, tracer_provider: Any = None, **settings: Any) -> AsyncIterator[Router]:
    server = RouterServer(config(**settings), tracer_provider=tracer_provider)
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Router(server, address, channel, InferenceServiceStub(channel), ClusterServiceStub(channel))
    finally:
        await server.stop(1.0)


async def until(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition, awaitable or not. The bound ends a test that hangs; a machine may pause for seconds."""
    async with asyncio.timeout(seconds):
        while True:
            result = holds()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.01)


def request(prompt: str = "def f(x):", **fields: Any) -> inference_pb2.GenerateRequest:
    sampling = {"max_tokens": 20, "seed": 1, **fields.pop("sampling", {})}
    return inference_pb2.GenerateRequest(prompt=prompt, sampling=sampling, **fields)


@contextmanager
def nothing_left_to_the_collector(kind: type, most: int = 0) -> Iterator[None]:
    """Check that what happens meanwhile leaves the garbage collector nothing of a kind: its walk stops the loop."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = sum(isinstance(thing, kind) for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left <= most


async def is_idle(router: Router) -> bool:
    return await router.requests() == []


async def is_ready(router: Router) -> bool:
    return READY in (await router.states()).values()


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call of either kind ends with."""

    async def finish() -> None:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finish()
    return caught.value


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """ErrorInfo's reason: every error of the router has one."""
    status = rpc_status.from_call(error)
    assert status is not None, f"{error.code()} came without details"
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            assert info.domain == "blockyard"
            return str(info.reason)
    raise AssertionError("no ErrorInfo")


def fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    bad_request = error_details_pb2.BadRequest()
    status = rpc_status.from_call(error)
    assert status is not None
    return [
        violation.field
        for detail in status.details
        if detail.Unpack(bad_request)
        for violation in bad_request.field_violations
    ]
