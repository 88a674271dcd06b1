"""Adapter calls: the calls by which routers add, remove and list the adapters of a worker.

Owns how failures become status codes. Does not own folders (../lora/) or what runs (the engine).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from blockyard.proto.naming.identifiers import is_id
from blockyard.proto.v1 import admin_pb2
from blockyard.worker.inspection.parsing import parse
from blockyard.worker.lora.catalogue import AdapterCatalogue, CatalogueFull
from blockyard.worker.lora.peft import AdapterMissing

if TYPE_CHECKING:
    from blockyard.worker.engine import Engine
    from blockyard.worker.engine_thread import EngineThread
    from blockyard.worker.inspection.parsing import Context
    from blockyard.worker.lora.catalogue import NamedAdapter
    from blockyard.worker.sequences.adapter import Adapter
    from google.protobuf.message import Message

MAX_DETAIL_CHARS = 500
"""An error may quote a name of the folder's author, and a longer status than some kB is lost on its way."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class AdapterCalls:
    """Serves the calls on one worker. Without a catalogue it refuses them."""

    def __init__(self, engine: EngineThread, adapters: AdapterCatalogue | None) -> None:
        self._engine = engine
        self._adapters = adapters
        # Of its own, so that compiling grammars never waits for a folder that is slow to read.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._changing = asyncio.Lock()
        """Held from a change of the catalogue until the engine knows of it."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def behaviours(self) -> dict[str, Callable[[bytes, Context], Awaitable[Message]]]:
        return {"AddAdapter": self._add, "RemoveAdapter": self._remove, "ListAdapters": self._list}

    async def _catalogue(self, context: Context) -> AdapterCatalogue:
        if self._adapters is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "the worker serves no adapters (--max-loras)"
            )
        return self._adapters

    async def _add(self, data: bytes, context: Context) -> admin_pb2.AddAdapterResponse:
        request = await parse(admin_pb2.AddAdapterRequest, data, context)
        adapters = await self._catalogue(context)
        if not is_id(request.name):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "an adapter's name must have 1-128 characters of [A-Za-z0-9._:-]",
            )
        try:
            named = await self._whole(self._added(adapters, request.name, request.path))
        except AdapterMissing as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, _said(error))
        except (CatalogueFull, MemoryError) as error:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, _said(error) or "no host memory for the adapter"
            )
        except OSError as error:
            # Its text has the path on this machine.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.strerror or "cannot be read")
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _said(error))
        logger.info("adapter %s: %s, rank %d", named.name, named.adapter.fingerprint, named.adapter.rank)
        return admin_pb2.AddAdapterResponse(adapter=_message(named))

    async def _remove(self, data: bytes, context: Context) -> admin_pb2.RemoveAdapterResponse:
        request = await parse(admin_pb2.RemoveAdapterRequest, data, context)
        adapters = await self._catalogue(context)
        try:
            await self._whole(self._removed(adapters, request.name))
        except KeyError:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the worker has no adapter of this name")
        return admin_pb2.RemoveAdapterResponse()

    async def _list(self, data: bytes, context: Context) -> admin_pb2.ListAdaptersResponse:
        await parse(admin_pb2.ListAdaptersRequest, data, context)
        adapters = await self._catalogue(context)
        # Not in the thread that reads folders, since one of them may be slow.
        found = await asyncio.to_thread(adapters.all)
        return admin_pb2.ListAdaptersResponse(adapters=[_message(named) for named in found])

    async def _threaded(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, also where its call is cancelled meanwhile: catalogue and engine stay alike."""
        task = asyncio.ensure_future(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _added(self, adapters: AdapterCatalogue, name: str, path: str) -> NamedAdapter:
        async with self._changing:
            named, unnamed = await self._threaded(partial(adapters.add, name, path))
            await asyncio.wrap_future(self._engine.call(partial(_serve, named.adapter, unnamed)))
            return named

    async def _removed(self, adapters: AdapterCatalogue, name: str) -> None:
        async with self._changing:
            unnamed = await self._threaded(partial(adapters.remove, name))
            await asyncio.wrap_future(self._engine.call(partial(_serve, None, unnamed)))


def _said(error: Exception) -> str:
    return str(error)[:MAX_DETAIL_CHARS]


def _serve(added: Adapter | None, removed: str, engine: Engine) -> None:
    if added is not None:
        engine.adapters.add(added)
    engine.adapters.remove(removed)


def _message(named: NamedAdapter) -> admin_pb2.Adapter:
    return admin_pb2.Adapter(
        name=named.name,
        path=named.path,
        fingerprint=named.adapter.fingerprint,
        rank=named.adapter.rank,
        num_bytes=named.adapter.num_bytes,
    )
