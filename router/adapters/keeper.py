"""Adapter keeper: adds and removes the adapters of one model, and follows what other routers change.

An adapter is added once every connected worker has read it with the same content. A worker that comes later reads it
when the first request for it arrives (`bring`). All changes go through the log in Redis, if there is one. If Redis has
lost it, the routers write it again.

Does not own the names (registry.py), the log (log.py), or permissions (services/admin.py).
"""

import asyncio
import logging

import grpc
from blockyard.proto.v1 import admin_pb2
from blockyard.router.adapters.log import MAX_LOG_BYTES, AdapterLog
from blockyard.router.adapters.registry import AdapterRegistry, Change, RegisteredAdapter
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import EngineLink
from blockyard.router.errors import (
    DeadlinePassed,
    InvalidRequest,
    NotFound,
    RouterError,
    StoreUnavailable,
    UnknownModel,
    Unsupported,
    WorkerUnreachable,
)

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 1.0
"""Interval at which a router looks for changes of other routers."""
READ_SECONDS = 60.0
"""Time for a worker to read an adapter from its folder."""
MAX_DETAIL_CHARS = 300


class AdapterKeeper:
    """Adapters of one model. `log` is None where there is no Redis: this router alone knows them then."""

    def __init__(self, fleet: Fleet, log: AdapterLog | None = None) -> None:
        self.registry = AdapterRegistry()
        self._fleet = fleet
        self._log = log
        self._record = b""
        """The log when it was last read."""
        self._turn = asyncio.Lock()
        self._is_erased = False

    async def follow(self) -> None:
        """Take the changes of other routers, for ever. Where no worker has slots for adapters, Redis is not asked."""
        task = asyncio.current_task()
        # A cancellation at the moment of a time-out may be lost in the Redis client, but the task still counts it.
        while task is not None and not task.cancelling():
            if self._links():
                await self.refresh()
            await asyncio.sleep(FOLLOW_SECONDS)

    async def refresh(self) -> None:
        """Take the changes of other routers. Redis may be away: then keep what is known."""
        if self._log is None:
            return
        try:
            async with self._turn:
                if not self._is_erased:
                    await self._read(self._log)
        except StoreUnavailable:
            return

    async def erase(self) -> None:
        """Delete the log of a model that is not served any more, and take no further change.

        Each router does so once it serves the model no more. One that still does writes the log again, and deletes it
        later. What Redis does not answer to stays there.
        """
        async with self._turn:
            self._is_erased = True
            if self._log is None:
                return
            try:
                await self._log.take()
            except StoreUnavailable:
                logger.warning("the log of adapters of model %s stays in Redis", self._log.model.id)

    async def add(self, name: str, path: str, tenant: str, timeout_seconds: float) -> RegisteredAdapter:
        """Have all workers read an adapter, and give it a name. A name that exists stands for the new content.

        One worker reads it first. The others do so only if it can be served, so a spoilt folder costs one worker alone.

        Raises InvalidRequest for a folder that cannot be served, Unsupported without slots, WorkerUnreachable,
        DeadlinePassed or StoreUnavailable. The name is then as before.
        """
        links = self._links()
        if not links:
            raise Unsupported.of(
                "name", "needs a connected worker of the model with slots for adapters (--max-loras)"
            )
        first, *others = links
        due = asyncio.get_running_loop().time() + min(timeout_seconds, READ_SECONDS)
        found: list[admin_pb2.Adapter | BaseException] = [
            await _read_by(first, name, path, min(timeout_seconds, READ_SECONDS))
        ]
        seconds_left = due - asyncio.get_running_loop().time()
        asked = [_read_by(link, name, path, seconds_left) for link in others]
        found += await asyncio.gather(*asked, return_exceptions=True)
        failures = [answer for answer in found if isinstance(answer, BaseException)]
        if failures:
            raise failures[0]
        read = [answer for answer in found if isinstance(answer, admin_pb2.Adapter)]
        if len({adapter.fingerprint for adapter in read}) > 1:
            raise InvalidRequest.of("path", "has another content on some workers")
        adapter = RegisteredAdapter(
            name=name,
            fingerprint=read[0].fingerprint,
            path=path,
            rank=read[0].rank,
            num_bytes=read[0].num_bytes,
            tenant=tenant,
        )
        await self._change(name, adapter)
        for worker in self._fleet.view.workers():
            worker.lacking.discard(adapter.fingerprint)
        return adapter

    async def remove(self, name: str) -> None:
        """Forget a name. Requests that run go on. Raises NotFound or StoreUnavailable."""
        await self.refresh()
        if self.registry.find(name) is None:
            raise NotFound.of("name", "no adapter of this name is known")
        await self._change(name, None)
        request = admin_pb2.RemoveAdapterRequest(name=name)
        # A worker that does not hear of it keeps the weights in host memory until it ends, and serves them to nobody.
        await asyncio.gather(
            *(link.call("RemoveAdapter", request, READ_SECONDS) for link in self._links()),
            return_exceptions=True,
        )

    async def bring(self, address: str, adapter: RegisteredAdapter) -> None:
        """Have a worker read an adapter that a request needs there. A worker that cannot is left out from then on."""
        worker, link = self._fleet.view.at(address), self._fleet.links.get(address)
        if worker is None or link is None:
            return
        try:
            read = await _read_by(link, adapter.name, adapter.path, READ_SECONDS)
        except (WorkerUnreachable, DeadlinePassed):
            return  # The request is placed again.
        except RouterError as error:
            logger.error(
                "worker %s cannot load adapter %s: %s", worker.worker_id, adapter.name, error.message
            )
        else:
            if read.fingerprint == adapter.fingerprint:
                return
            logger.error(
                "worker %s has another content in the folder of adapter %s than when it was added",
                worker.worker_id,
                adapter.name,
            )
        worker.lacking.add(adapter.fingerprint)

    async def _change(self, name: str, adapter: RegisteredAdapter | None) -> None:
        """Make a change known, here and to all routers. Raises StoreUnavailable, or UnknownModel after `erase`."""
        async with self._turn:
            if self._is_erased:
                raise UnknownModel.of("model", "is not served any more")
            if self._log is None:
                self.registry.apply(self.registry.change(name, adapter))
                return
            await self._read(self._log)
            taken = await self._taken(self._log)
            change = self.registry.change(name, adapter)
            await self._log.append([*taken, change])
            self.registry.apply(change)

    async def _read(self, log: AdapterLog) -> None:
        record = await log.read()
        if record == self._record and record:
            return
        self._record, changes = record, log.changes(record)
        self.registry.apply(*changes)
        if missing := self.registry.missing(changes):
            logger.warning("Redis has lost %d adapters: they are written again", len(missing))
            await log.append(await self._taken(log) or missing)

    async def _taken(self, log: AdapterLog) -> list[Change]:
        """Take out a log that is long, or that cannot be read to its end. Return what must be written in its place."""
        if len(self._record) <= MAX_LOG_BYTES and log.is_whole(self._record):
            return []
        self.registry.apply(*log.changes(await log.take()))
        return self.registry.changes()

    def _links(self) -> list[EngineLink]:
        return [
            self._fleet.links[worker.address]
            for worker in self._fleet.view.workers()
            if worker.hello is not None and worker.hello.max_loras and self._fleet.links[worker.address].is_up
        ]


async def _read_by(link: EngineLink, name: str, path: str, timeout_seconds: float) -> admin_pb2.Adapter:
    """Have a worker read an adapter, and return what it has read.

    Raises InvalidRequest, DeadlinePassed or WorkerUnreachable.
    """
    request = admin_pb2.AddAdapterRequest(name=name, path=path)
    try:
        response: admin_pb2.AddAdapterResponse = await link.call("AddAdapter", request, timeout_seconds)
    except ConnectionError:
        raise WorkerUnreachable("a worker is not connected") from None
    except grpc.aio.AioRpcError as error:
        raise _as_answer(error) from None
    return response.adapter


def _as_answer(error: grpc.aio.AioRpcError) -> RouterError:
    detail = (error.details() or "")[:MAX_DETAIL_CHARS]
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest.of("path", detail or "has no adapter that can be served")
        case grpc.StatusCode.NOT_FOUND:
            return InvalidRequest.of("path", detail or "is no folder on some worker")
        case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return InvalidRequest.of("path", detail or "has an adapter for which a worker has no room")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlinePassed("a worker did not read the adapter in time")
    return WorkerUnreachable(f"a worker did not answer: {error.code().name}")
