"""A worker's pool as operators see it: GetBlockPool, and ListBlocks page by page.

Owns page tokens, which are good for one life of one worker. How a pool becomes a message is pool_view.py's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import grpc
from blockyard.proto.v1 import cluster_pb2
from blockyard.worker.calls import check_secret, parse
from blockyard.worker.pool_view import block_messages, pool_message, take_snapshot

if TYPE_CHECKING:
    from blockyard.proto.v1.session_pb2 import Hello
    from blockyard.worker.calls import Context
    from blockyard.worker.engine_thread import EngineThread
    from blockyard.worker.sequence import RequestId

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_PAGE_TOKEN = 256
"""Characters. Python refuses to read a number of thousands of digits."""


class Inspection:
    """`request_ids` says, on the engine's thread, under which ids clients know the engine's requests."""

    def __init__(
        self, *, hello: Hello, cluster_secret: str, request_ids: Callable[[], Mapping[RequestId, str]]
    ) -> None:
        self._hello = hello
        self._secret = cluster_secret
        self._request_ids = request_ids
        self._engine: EngineThread

    def attach(self, engine: EngineThread) -> None:
        self._engine = engine

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        return {
            "GetBlockPool": grpc.unary_unary_rpc_method_handler(
                self._get_block_pool, response_serializer=cluster_pb2.BlockPool.SerializeToString
            ),
            "ListBlocks": grpc.unary_unary_rpc_method_handler(
                self._list_blocks, response_serializer=cluster_pb2.ListBlocksResponse.SerializeToString
            ),
        }

    async def block_pool(self) -> cluster_pb2.BlockPool:
        """The pool as it is between two steps."""
        hello = self._hello
        snapshot = await asyncio.wrap_future(self._engine.call(take_snapshot))
        return await asyncio.to_thread(
            pool_message, snapshot, worker_id=hello.worker_id, incarnation=hello.incarnation
        )

    async def _get_block_pool(self, data: bytes, context: Context) -> cluster_pb2.BlockPool:
        await check_secret(context, self._secret)
        await parse(cluster_pb2.GetBlockPoolRequest, data, context)
        return await self.block_pool()

    async def _list_blocks(self, data: bytes, context: Context) -> cluster_pb2.ListBlocksResponse:
        await check_secret(context, self._secret)
        request = await parse(cluster_pb2.ListBlocksRequest, data, context)
        size = request.page_size or DEFAULT_PAGE_SIZE
        start = self._page_start(request.page_token)
        if size > MAX_PAGE_SIZE:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"page_size is above {MAX_PAGE_SIZE}")
        if start is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "page_token is not one of this worker's")
        assert start is not None
        blocks = await asyncio.wrap_future(
            self._engine.call(lambda engine: block_messages(engine, start, size, self._request_ids()))
        )
        following = start + size
        token = self._page_token(following) if following < self._hello.total_blocks else ""
        return cluster_pb2.ListBlocksResponse(blocks=blocks, next_page_token=token)

    def _page_token(self, start: int) -> str:
        return base64.urlsafe_b64encode(f"{self._hello.incarnation}:{start}".encode()).decode()

    def _page_start(self, token: str) -> int | None:
        """Where a page begins; None for a token of another worker, another life, or of nobody."""
        if not token:
            return 0
        if len(token) > MAX_PAGE_TOKEN:
            return None
        try:
            incarnation, _, start = base64.urlsafe_b64decode(token).decode().rpartition(":")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return None
        valid = incarnation == self._hello.incarnation and start.isdecimal()
        return int(start) if valid and int(start) < self._hello.total_blocks else None
