"""Helpers that the rows share: a whole cluster to begin with, a client, a fault's victims, and what it cost them."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from blockyard.proto.v1.inference_pb2_grpc import InferenceServiceStub
from blockyard.router.client import AsyncClient
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from tests.system.load import Stream, until_ready
from tests.system.processes import Process, Processes

READY_SECONDS = 90.0


@asynccontextmanager
async def whole(cluster: Processes, *routers: Process) -> AsyncIterator[AsyncClient]:
    """Restart dead workers and wait until all are READY. Yield a client that never retries, of the first router or of
    those given."""
    asked = routers or tuple(cluster.routers.values())[:1]
    dead = [worker for worker in cluster.workers.values() if not worker.is_running]
    cluster.start(*dead)
    async with AsyncClient([router.address for router in asked], retries=0) as client:
        await until_ready(client, *cluster.workers, seconds=READY_SECONDS)
        yield client


def busiest(held: Mapping[str, str]) -> str:
    """Return the worker with the most requests."""
    return Counter(held.values()).most_common(1)[0][0]


def victims(streams: Iterable[Stream], held: Mapping[str, str], worker: str) -> list[Stream]:
    return [stream for stream in streams if held[stream.request_id] == worker]


def cost(touched: Sequence[Stream], lost_worker: str, *, at: float) -> dict[str, Any]:
    """Return the figures of the requests that a fault touched: failed, migrated, and their longest pause."""
    return {
        "failed": sum(stream.error is not None for stream in touched),
        "migrated": sum(
            stream.finish is not None and stream.finish.worker_id != lost_worker for stream in touched
        ),
        "recovery_seconds": max((stream.longest_gap(at) for stream in touched), default=0.0),
    }


async def is_serving(router: Process) -> bool:
    """Return whether the health service reports SERVING."""
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def raw_inference(router: Process, *options: tuple[str, Any]) -> AsyncIterator[Any]:
    """Yield a raw stub, for calls that our client never makes."""
    async with grpc.aio.insecure_channel(router.address, options=options) as channel:
        yield InferenceServiceStub(channel)  # type: ignore[no-untyped-call]


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """Return the ErrorInfo of an error from a raw stub."""
    status = rpc_status.from_call(error)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    return info
