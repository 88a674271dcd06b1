"""Administration: the calls by which an operator drains, resumes and flushes a worker, republishes or fetches blocks.

Owns the calls and the bounds of their fields. Routers decide which client may make them: a worker knows only that a
process of its cluster calls (tls.py). Does not own draining itself (draining.py), the cache (engine.py) or the index
(indexing/).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from blockyard.proto.naming.block_hash import NAME_BYTES, split_names
from blockyard.proto.runtime.grace import GRACE_RULE, grace_seconds_of
from blockyard.proto.v1 import admin_pb2, session_pb2
from blockyard.worker.inspection.parsing import parse
from blockyard.worker.scheduling.pulls import NoHostMemory, PullOrder, PullsBusy, UnderWay
from blockyard.worker.sequences.identifiers import BlockName, TenantId
from blockyard.worker.session.adapter_calls import AdapterCalls
from blockyard.worker.session.draining import Draining, DrainTakenBack, ShuttingDown

if TYPE_CHECKING:
    from blockyard.worker.engine_thread import EngineThread
    from blockyard.worker.indexing.sharded_publisher import ShardedPublisher
    from blockyard.worker.inspection.parsing import Context
    from blockyard.worker.lora.catalogue import AdapterCatalogue
    from blockyard.worker.session.session import SessionService
    from blockyard.worker.transfer.exchange import Exchange
    from google.protobuf.message import Message

MAX_PULL_SECONDS = 60.0
"""Longest pull that an operator may order. A loan lasts no longer either."""


class Administration:
    """Serves the calls on one worker. `index` is the publisher, None where the worker has none."""

    def __init__(self, *, service: SessionService, engine: EngineThread) -> None:
        self._engine = engine
        self.draining = Draining(service)
        self.draining.on_change = self._update_index
        self.index: ShardedPublisher | None = None
        self.exchange: Exchange | None = None
        """Transfers from and to other workers. None: this worker has none."""

    def methods(self, adapters: AdapterCatalogue | None = None) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the handlers of the calls. `adapters` are those of the worker, None where it serves none."""
        behaviours: dict[str, Callable[[bytes, Context], Awaitable[Message]]] = {
            "DrainWorker": self._drain,
            "ResumeWorker": self._resume,
            "FlushCache": self._flush,
            "RebuildIndex": self._rebuild,
            "PullBlocks": self._pull,
            **AdapterCalls(self._engine, adapters).behaviours(),
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

    async def _pull(self, data: bytes, context: Context) -> session_pb2.PullBlocksResponse:
        request = await parse(session_pb2.PullBlocksRequest, data, context)
        if not request.block_names or len(request.block_names) % NAME_BYTES or not request.pull.seconds > 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a pull needs names of 16 bytes and a time")
        if self.exchange is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the worker fetches no blocks")
        names = [BlockName(name) for name in split_names(request.block_names)]
        order = PullOrder(
            address=request.pull.address,
            incarnation=request.pull.incarnation,
            num_blocks=len(names),
            seconds=min(request.pull.seconds, MAX_PULL_SECONDS),
        )
        try:
            report, num_here = await asyncio.wrap_future(
                self.exchange.order(names, order, TenantId(request.tenant))
            )
        except NoHostMemory:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no host memory for blocks")
        except PullsBusy:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room for a pull")
        except UnderWay:
            await context.abort(grpc.StatusCode.ABORTED, "another pull fetches these blocks")
        done = session_pb2.PullReport(end=session_pb2.PULL_END_WHOLE)
        if report is not None:
            # Shielded: the pull goes on although the caller stops waiting.
            done = await asyncio.shield(asyncio.wrap_future(report))
        return session_pb2.PullBlocksResponse(report=done, blocks_before=num_here)


def _serialize(response: Message) -> bytes:
    return response.SerializeToString()
