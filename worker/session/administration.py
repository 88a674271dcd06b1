"""Administration: the calls by which an operator drains, resumes and flushes a worker, or republishes its blocks.

Owns the calls and the bounds of their fields. Routers decide which client may make them: a worker knows only that a
process of its cluster calls (tls.py). Does not own draining itself (draining.py), the cache (engine.py) or the index
(indexing/).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from blockyard.proto.runtime.grace import GRACE_RULE, grace_seconds_of
from blockyard.proto.v1 import admin_pb2
from blockyard.worker.inspection.parsing import parse
from blockyard.worker.session.draining import Draining, DrainTakenBack, ShuttingDown

if TYPE_CHECKING:
    from blockyard.worker.engine_thread import EngineThread
    from blockyard.worker.indexing.sharded_publisher import ShardedPublisher
    from blockyard.worker.inspection.parsing import Context
    from blockyard.worker.session.session import SessionService
    from google.protobuf.message import Message


class Administration:
    """Serves the calls on one worker. `index` is the publisher, None where the worker has none."""

    def __init__(self, *, service: SessionService, engine: EngineThread) -> None:
        self._engine = engine
        self.draining = Draining(service)
        self.draining.on_change = self._update_index
        self.index: ShardedPublisher | None = None

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        behaviours: dict[str, Callable[[bytes, Context], Awaitable[Message]]] = {
            "DrainWorker": self._drain,
            "ResumeWorker": self._resume,
            "FlushCache": self._flush,
            "RebuildIndex": self._rebuild,
        }
        return {
            name: grpc.unary_unary_rpc_method_handler(behaviour, response_serializer=_serialize)
            for name, behaviour in behaviours.items()
        }

    def _update_index(self, is_draining: bool) -> None:
        """Withdraw a draining worker from the index, so that it attracts no request. Restore it when it resumes."""
        if self.index is not None and is_draining:
            self.index.withdraw()
        elif self.index is not None:
            self.index.restore()

    async def _drain(self, data: bytes, context: Context) -> admin_pb2.DrainWorkerResponse:
        request = await parse(admin_pb2.DrainWorkerRequest, data, context)
        grace_seconds = grace_seconds_of(request)
        if grace_seconds is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"grace_seconds {GRACE_RULE}")
        try:
            moved = await self.draining.drain(grace_seconds)
        except DrainTakenBack:
            await context.abort(grpc.StatusCode.ABORTED, "the drain was taken back")
        except Exception:  # Its task has logged it.
            await context.abort(grpc.StatusCode.INTERNAL, "the drain failed: see the worker's log")
        return admin_pb2.DrainWorkerResponse(moved=moved)

    async def _resume(self, data: bytes, context: Context) -> admin_pb2.ResumeWorkerResponse:
        await parse(admin_pb2.ResumeWorkerRequest, data, context)
        try:
            self.draining.resume()
        except ShuttingDown:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the worker is shutting down")
        return admin_pb2.ResumeWorkerResponse()

    async def _flush(self, data: bytes, context: Context) -> admin_pb2.FlushCacheResponse:
        await parse(admin_pb2.FlushCacheRequest, data, context)
        blocks, host_blocks = await asyncio.wrap_future(self._engine.call(lambda engine: engine.flush()))
        return admin_pb2.FlushCacheResponse(flushed_blocks=blocks, flushed_host_blocks=host_blocks)

    async def _rebuild(self, data: bytes, context: Context) -> admin_pb2.RebuildIndexResponse:
        await parse(admin_pb2.RebuildIndexRequest, data, context)
        tells = self.index is not None and self.index.rebuild()
        return admin_pb2.RebuildIndexResponse(workers=int(tells))


def _serialize(response: Message) -> bytes:
    return response.SerializeToString()
