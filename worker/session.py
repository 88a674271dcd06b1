"""The engine session's server: streams from routers in, one engine behind them.

Owns who asked for which request, and what waits to be sent to whom. A router that reads slowly costs nothing but its
own freshness: what it has not taken yet is merged, so an outbox never holds more rows than its requests have outputs.
The engine never waits for a stream; the end of a stream cancels its requests. (submits.py says what a Submit asks for,
compiling.py holds what waits for its grammar, outbox.py what waits for the router.)

Threads: `_routes` and each link's `requests` are changed on the engine's thread only, everything else on the loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from blockyard.proto.v1 import session_pb2
from blockyard.proto.v1.cluster_pb2 import WorkerIndex
from blockyard.proto.v1.session_pb2 import (
    Cancel,
    Hello,
    RejectReason,
    Submit,
    ToRouter,
    ToWorker,
)
from blockyard.worker.calls import check_secret
from blockyard.worker.compiling import CompileGrammar, Compiling
from blockyard.worker.engine import Engine
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.engine_types import EngineLoad, EngineRequest, SequenceOutput, StepResult
from blockyard.worker.inspection import Inspection
from blockyard.worker.outbox import Outbox
from blockyard.worker.pool_view import load_message
from blockyard.worker.scheduler import CapacityError
from blockyard.worker.sequence import RequestId
from blockyard.worker.submits import Refused, engine_request
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from blockyard.worker.calls import Context

logger = logging.getLogger(__name__)

LOAD_REPORT_SECONDS = 0.05


class _BadMessage(Exception):
    """The router sent what no router of ours would send; the text says what."""


@dataclass(slots=True, eq=False)
class _Link:
    """One router's stream: what waits for it, and which requests are its, by handle."""

    compiling: Compiling
    requests: dict[int, RequestId] = field(default_factory=dict)
    outbox: Outbox = field(default_factory=Outbox)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def reject(self, handle: int, reason: RejectReason, detail: str = "") -> None:
        self.outbox.reject(handle, reason, detail)
        self.has_news.set()

    def take(self, load: EngineLoad) -> list[ToRouter]:
        self.has_news.clear()
        return self.outbox.take(load)


@dataclass(frozen=True, slots=True)
class _Route:
    """Whose a request is."""

    link: _Link
    handle: int
    request_id: str


class SessionService:
    """EngineService over one engine thread. Made and used on one event loop."""

    def __init__(
        self,
        *,
        hello: Hello,
        cluster_secret: str,
        vocab_size: int,
        max_waiting: int,
        compile_grammar: CompileGrammar | None = None,
    ) -> None:
        """Without `compile_grammar` structured output is refused."""
        self._hello = hello
        self._secret = cluster_secret
        self._vocab_size = vocab_size
        self._max_waiting = max_waiting
        self._compile_grammar = compile_grammar
        self._routes: dict[RequestId, _Route] = {}
        self._links: set[_Link] = set()
        self._loop = asyncio.get_running_loop()
        self._engine: EngineThread
        self._load: EngineLoad
        self.inspection = Inspection(
            hello=hello, cluster_secret=cluster_secret, request_ids=self._client_request_ids
        )
        self.on_changes: Callable[[StepResult], None] = lambda result: None
        self.index_part: Callable[[], WorkerIndex | None] = lambda: None
        """What routers are told of this worker's part of the prefix index."""
        self.draining = False

    def attach(self, engine: EngineThread, load: EngineLoad) -> None:
        """Gives the service its engine; `on_step` is what the engine must call."""
        self._engine, self._load = engine, load
        self.inspection.attach(engine)

    @property
    def load(self) -> EngineLoad:
        """As of the last step."""
        return self._load

    def handler(self) -> grpc.GenericRpcHandler:
        """Methods take raw bytes: a message that does not parse gets INVALID_ARGUMENT, where gRPC says UNKNOWN."""
        methods = self.inspection.methods() | {
            "Session": grpc.stream_stream_rpc_method_handler(
                self._session, response_serializer=ToRouter.SerializeToString
            )
        }
        name = session_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
        return grpc.method_handlers_generic_handler(name, methods)

    def _client_request_ids(self) -> dict[RequestId, str]:
        return {key: route.request_id for key, route in self._routes.items()}

    # What the engine says

    def on_step(self, result: StepResult, load: EngineLoad) -> None:
        """Called on the engine's thread."""
        news = []
        for output in result.outputs:
            route = self._routes.get(output.request_id)
            if route is None:
                continue
            news.append((route, output))
            if output.is_last:
                self._forget(route.link, route.handle, output.request_id)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._deliver, news, result, load)

    def _forget(self, link: _Link, handle: int, request_id: RequestId) -> None:
        link.requests.pop(handle, None)
        self._routes.pop(request_id, None)

    def _deliver(
        self, news: list[tuple[_Route, SequenceOutput]], result: StepResult, load: EngineLoad
    ) -> None:
        self._load = load
        for route, output in news:
            route.link.outbox.add(route.handle, output)
            route.link.has_news.set()
        self.on_changes(result)

    # What routers say

    async def _session(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[ToRouter]:
        await check_secret(context, self._secret)
        link = _Link(Compiling(self._compile_grammar))
        self._links.add(link)
        self._hello.load.CopyFrom(load_message(self._load))
        reader = asyncio.create_task(self._read(requests, link))
        try:
            yield ToRouter(hello=self._hello)
            while not reader.done():
                for message in link.take(self._load):
                    yield message
                await self._wait_for_news(link, reader)
            await reader
        except _BadMessage as bad:
            # Said here and not by the reader: an abort beside a send under way may never reach the router.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(bad))
        finally:
            reader.cancel()
            link.compiling.cancel_all()
            self._links.discard(link)
            self._engine.call(partial(self._cancel_all, link))

    async def _wait_for_news(self, link: _Link, reader: asyncio.Task[None]) -> None:
        """Until something waits for the router, the load has changed, or the router is gone."""
        news = asyncio.create_task(link.has_news.wait())
        try:
            while not news.done() and not reader.done() and self._load == link.outbox.reported:
                await asyncio.wait(
                    (news, reader), timeout=LOAD_REPORT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            news.cancel()

    async def _read(self, requests: AsyncIterator[bytes], link: _Link) -> None:
        async for data in requests:
            try:
                message = ToWorker.FromString(data)
            except DecodeError as error:
                raise _BadMessage("this is no ToWorker") from error
            match message.WhichOneof("message"):
                case "submit" if message.submit.sampling.HasField("structured_output"):
                    self._compile_first(link, message.submit)
                case "submit":
                    self._submit(link, message.submit)
                case "cancel":
                    self._take_cancel(link, message.cancel)
                case "ping":
                    link.outbox.answer_ping(message.ping.nonce, self._load, self.index_part())
                    link.has_news.set()
                case None:
                    raise _BadMessage("the message says nothing")

    def _compile_first(self, link: _Link, submit: Submit) -> None:
        refuse = partial(link.reject, submit.handle)
        try:
            request = self._compilable(link, submit)
        except Refused as refused:
            refuse(refused.reason)
            return
        wanted = submit.sampling.structured_output
        link.compiling.start(
            submit.handle, request, wanted, then=partial(self._submit, link, submit), refuse=refuse
        )

    def _compilable(self, link: _Link, submit: Submit) -> EngineRequest:
        if self.draining:
            raise Refused(RejectReason.REJECT_REASON_DRAINING)
        if sum(len(other.compiling) for other in self._links) >= self._max_waiting:
            raise Refused(RejectReason.REJECT_REASON_BUSY)
        if submit.handle in link.compiling:
            raise Refused(RejectReason.REJECT_REASON_INVALID)
        return self._engine_request(submit)

    # To the engine

    def _submit(self, link: _Link, submit: Submit, request: EngineRequest | None = None) -> None:
        """`request` is what it asks for, where that has been looked at already."""

        def run(engine: Engine) -> None:
            try:
                self._start(engine, link, submit, request)
            except Refused as refused:
                reason = refused.reason
            except Exception:
                logger.exception("a submit failed")
                reason = RejectReason.REJECT_REASON_INTERNAL
            else:
                return
            self._loop.call_soon_threadsafe(link.reject, submit.handle, reason)

        self._engine.call(run)

    def _start(self, engine: Engine, link: _Link, submit: Submit, request: EngineRequest | None) -> None:
        if self.draining:
            raise Refused(RejectReason.REJECT_REASON_DRAINING)
        if len(engine.scheduler.waiting) >= self._max_waiting:
            raise Refused(RejectReason.REJECT_REASON_BUSY)
        if link not in self._links or submit.handle in link.requests:
            raise Refused(RejectReason.REJECT_REASON_INVALID)
        try:
            request_id = engine.submit(request or self._engine_request(submit))
        except CapacityError as error:
            raise Refused(RejectReason.REJECT_REASON_TOO_LARGE) from error
        except ValueError as error:
            raise Refused(RejectReason.REJECT_REASON_INVALID) from error
        link.requests[submit.handle] = request_id
        self._routes[request_id] = _Route(link, submit.handle, submit.request_id)

    def _engine_request(self, submit: Submit) -> EngineRequest:
        """Raises Refused."""
        try:
            return engine_request(submit, vocab_size=self._vocab_size, block_size=self._hello.block_size)
        except ValueError as error:
            raise Refused(RejectReason.REJECT_REASON_INVALID) from error

    def _take_cancel(self, link: _Link, cancel: Cancel) -> None:
        index = cancel.index if cancel.HasField("index") else None
        if index is None:
            link.compiling.cancel(cancel.handle)
        end = partial(self._cancel, link, cancel.handle, index)
        link.compiling.afterwards(cancel.handle, partial(self._engine.call, end))

    def _cancel(self, link: _Link, handle: int, index: int | None, engine: Engine) -> None:
        request_id = link.requests.get(handle)
        if request_id is not None and not engine.cancel(request_id, index):
            self._forget(link, handle, request_id)

    def _cancel_all(self, link: _Link, engine: Engine) -> None:
        for handle in tuple(link.requests):
            self._cancel(link, handle, None, engine)
