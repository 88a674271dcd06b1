"""Inspection calls: the whole pool, blocks page by page or by name, and sequences, as operators see them.

Owns the calls and the bounds of their requests. Does not turn engine state into messages (pool_view.py,
sequence_view.py) or read page tokens (page_tokens.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from blockyard.proto.limits import MAX_PAGE_SIZE
from blockyard.proto.naming.block_hash import NAME_BYTES
from blockyard.proto.v1 import cluster_pb2
from blockyard.worker.inspection.page_tokens import page_position, page_token
from blockyard.worker.inspection.parsing import parse
from blockyard.worker.inspection.pool_view import block_messages, blocks_found, pool_message, take_snapshot
from blockyard.worker.inspection.sequence_view import one_sequence, sequence_page
from blockyard.worker.sequences.identifiers import BlockId

if TYPE_CHECKING:
    from blockyard.proto.v1.session_pb2 import Hello
    from blockyard.worker.engine import Engine
    from blockyard.worker.engine_thread import EngineThread
    from blockyard.worker.inspection.parsing import Context
    from blockyard.worker.sequences.identifiers import RequestId
    from google.protobuf.message import Message

DEFAULT_PAGE_SIZE = 100


class Inspection:
    """Serves the calls on one engine. `request_ids` returns, on the engine's thread, the clients' ids of the engine's
    requests."""

    def __init__(self, *, hello: Hello, request_ids: Callable[[], Mapping[RequestId, str]]) -> None:
        self._hello = hello
        self._request_ids = request_ids
        self._engine: EngineThread
        # Of its own, so that compiling grammars never waits for those who look at blocks.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inspection")

    def attach(self, engine: EngineThread) -> None:
        self._engine = engine

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        behaviours: dict[str, Callable[[bytes, Context], Awaitable[Message]]] = {
            "GetBlockPool": self._get_block_pool,
            "ListBlocks": self._list_blocks,
            "FindBlocks": self._find_blocks,
            "ListSequences": self._list_sequences,
        }
        return {
            name: grpc.unary_unary_rpc_method_handler(behaviour, response_serializer=_serialize)
            for name, behaviour in behaviours.items()
        }

    async def block_pool(self) -> cluster_pb2.BlockPool:
        """Return the pool as it is between two steps."""
        hello = self._hello
        snapshot = await asyncio.wrap_future(self._engine.call(take_snapshot))
        message = partial(pool_message, snapshot, worker_id=hello.worker_id, incarnation=hello.incarnation)
        return await asyncio.get_running_loop().run_in_executor(self._thread, message)

    async def _get_block_pool(self, data: bytes, context: Context) -> cluster_pb2.BlockPool:
        await parse(cluster_pb2.GetBlockPoolRequest, data, context)
        return await self.block_pool()

    async def _list_blocks(self, data: bytes, context: Context) -> cluster_pb2.ListBlocksResponse:
        request = await parse(cluster_pb2.ListBlocksRequest, data, context)
        size, total = await _page_size(request.page_size, context), self._hello.total_blocks
        start = await self._start("blocks", request.page_token, context)
        following = start + size
        wanted = range(start, min(following, total))
        blocks = await asyncio.wrap_future(self._engine.call(lambda engine: self._blocks(engine, wanted, ())))
        token = page_token(self._hello.incarnation, "blocks", following) if following < total else ""
        return cluster_pb2.ListBlocksResponse(blocks=blocks, next_page_token=token)

    async def _find_blocks(self, data: bytes, context: Context) -> cluster_pb2.FindBlocksResponse:
        request = await parse(cluster_pb2.FindBlocksRequest, data, context)
        ids, names = list(request.block_ids), list(request.names)
        if max(len(ids), len(names)) > MAX_PAGE_SIZE or any(len(name) != NAME_BYTES for name in names):
            rule = f"at most {MAX_PAGE_SIZE} block_ids, and as many names of {NAME_BYTES} bytes each"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, rule)
        blocks = await asyncio.wrap_future(self._engine.call(lambda engine: self._blocks(engine, ids, names)))
        return cluster_pb2.FindBlocksResponse(blocks=blocks)

    def _blocks(self, engine: Engine, ids: Iterable[int], names: Iterable[bytes]) -> list[cluster_pb2.Block]:
        found: list[BlockId] = blocks_found(engine, ids, names)[:MAX_PAGE_SIZE]
        return block_messages(engine, found, self._request_ids())

    async def _list_sequences(self, data: bytes, context: Context) -> cluster_pb2.ListSequencesResponse:
        request = await parse(cluster_pb2.ListSequencesRequest, data, context)
        size = await _page_size(request.page_size, context)
        after = await self._start("sequences", request.page_token, context) - 1

        def look(engine: Engine) -> tuple[list[cluster_pb2.SequenceInfo], int | None]:
            if request.HasField("sequence_id"):
                return one_sequence(engine, request.sequence_id, self._request_ids()), None
            return sequence_page(engine, after, size, self._request_ids())

        sequences, last = await asyncio.wrap_future(self._engine.call(look))
        token = "" if last is None else page_token(self._hello.incarnation, "sequences", last + 1)
        return cluster_pb2.ListSequencesResponse(sequences=sequences, next_page_token=token)

    async def _start(self, kind: str, token: str, context: Context) -> int:
        """Return where a page begins. Ends the call as INVALID_ARGUMENT for a token that is not ours."""
        position = page_position(token, self._hello.incarnation, kind) if token else 0
        if position is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "page_token is not from this worker's list")
        assert position is not None
        return position


async def _page_size(asked: int, context: Context) -> int:
    if asked > MAX_PAGE_SIZE:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"page_size is above {MAX_PAGE_SIZE}")
    return asked or DEFAULT_PAGE_SIZE


def _serialize(response: Message) -> bytes:
    return response.SerializeToString()
