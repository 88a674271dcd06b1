"""The engine session's server: streams from routers in, one engine behind them.

Owns who asked for which sequence, and what waits to be sent to whom. A router that reads slowly costs nothing but its
own freshness: what it has not taken yet is merged, so an outbox never holds more rows than its sequences. The engine
never waits for a stream; the end of a stream cancels its sequences. (outbox.py holds what waits.)

Threads: `_routes` and each link's `sequences` are changed on the engine's thread only, everything else on the loop's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from blockyard.proto.block_hash import NAME_BYTES, split_names, unpack_tokens
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.proto.v1.session_pb2 import (
    Hello,
    RejectReason,
    Submit,
    ToRouter,
    ToWorker,
)
from blockyard.worker.engine import (
    Engine,
    EngineLoad,
    EngineRequest,
    EngineThread,
    SequenceOutput,
    StepResult,
)
from blockyard.worker.outbox import Outbox
from blockyard.worker.pool_view import block_messages, load_message, pool_message, take_snapshot
from blockyard.worker.scheduler import CapacityError
from blockyard.worker.sequence import BlockName, SamplingParams, SequenceId, SequenceState
from google.protobuf.message import DecodeError, Message

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

SECRET_HEADER = "x-blockyard-secret"
LOAD_REPORT_SECONDS = 0.05
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
M = TypeVar("M", bound=Message)


class _Refused(Exception):
    """A submit that will not run, and why."""

    def __init__(self, reason: RejectReason) -> None:
        super().__init__(RejectReason.Name(reason))
        self.reason = reason


class _BadMessage(Exception):
    """The router sent what no router of ours would send; the text says what."""


@dataclass(slots=True, eq=False)
class _Link:
    """One router's stream: what waits for it, and which sequences are its."""

    sequences: dict[int, SequenceId] = field(default_factory=dict)
    outbox: Outbox = field(default_factory=Outbox)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def reject(self, handle: int, reason: RejectReason) -> None:
        self.outbox.reject(handle, reason)
        self.has_news.set()

    def take(self, load: EngineLoad) -> list[ToRouter]:
        self.has_news.clear()
        return self.outbox.take(load)


@dataclass(frozen=True, slots=True)
class _Route:
    """Whose a sequence is."""

    link: _Link
    handle: int
    request_id: str


class SessionService:
    """EngineService over one engine thread. Made and used on one event loop."""

    def __init__(self, *, hello: Hello, cluster_secret: str, vocab_size: int, max_waiting: int) -> None:
        self._hello = hello
        self._secret = cluster_secret
        self._vocab_size = vocab_size
        self._max_waiting = max_waiting
        self._routes: dict[SequenceId, _Route] = {}
        self._links: set[_Link] = set()
        self._loop = asyncio.get_running_loop()
        self._engine: EngineThread
        self._load: EngineLoad
        self.on_changes: Callable[[StepResult], None] = lambda result: None
        self.draining = False

    def attach(self, engine: EngineThread, load: EngineLoad) -> None:
        """Gives the service its engine; `on_step` is what the engine must call."""
        self._engine, self._load = engine, load

    @property
    def load(self) -> EngineLoad:
        """As of the last step."""
        return self._load

    def handler(self) -> grpc.GenericRpcHandler:
        """Methods take raw bytes: a message that does not parse gets INVALID_ARGUMENT, where gRPC says UNKNOWN."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Session": grpc.stream_stream_rpc_method_handler(
                self._session, response_serializer=ToRouter.SerializeToString
            ),
            "GetBlockPool": grpc.unary_unary_rpc_method_handler(
                self._get_block_pool, response_serializer=cluster_pb2.BlockPool.SerializeToString
            ),
            "ListBlocks": grpc.unary_unary_rpc_method_handler(
                self._list_blocks, response_serializer=cluster_pb2.ListBlocksResponse.SerializeToString
            ),
        }
        name = session_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
        return grpc.method_handlers_generic_handler(name, methods)

    def on_step(self, result: StepResult, load: EngineLoad) -> None:
        """Called on the engine's thread."""
        news = []
        for output in result.outputs:
            route = self._routes.get(output.sequence_id)
            if route is None:
                continue
            news.append((route, output))
            if output.state is not SequenceState.RUNNING:
                del self._routes[output.sequence_id]
                route.link.sequences.pop(route.handle, None)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._deliver, news, result, load)

    def _deliver(
        self, news: list[tuple[_Route, SequenceOutput]], result: StepResult, load: EngineLoad
    ) -> None:
        self._load = load
        for route, output in news:
            route.link.outbox.add(route.handle, output)
            route.link.has_news.set()
        self.on_changes(result)

    async def _check_secret(self, context: Context) -> None:
        metadata = context.invocation_metadata() or ()
        shown = next((value for key, value in metadata if key == SECRET_HEADER), "")
        if not hmac.compare_digest(str(shown).encode(), self._secret.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster secret is missing or wrong")

    async def _session(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[ToRouter]:
        await self._check_secret(context)
        link = _Link()
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
                case "submit":
                    self._submit(link, message.submit)
                case "cancel":
                    self._engine.call(partial(self._cancel, link, message.cancel.handle))
                case "ping":
                    link.outbox.answer_ping(message.ping.nonce, self._load)
                    link.has_news.set()
                case None:
                    raise _BadMessage("the message says nothing")

    def _submit(self, link: _Link, submit: Submit) -> None:
        def run(engine: Engine) -> None:
            try:
                self._start(engine, link, submit)
            except _Refused as refused:
                reason = refused.reason
            except Exception:
                logger.exception("a submit failed")
                reason = RejectReason.REJECT_REASON_INTERNAL
            else:
                return
            self._loop.call_soon_threadsafe(link.reject, submit.handle, reason)

        self._engine.call(run)

    def _start(self, engine: Engine, link: _Link, submit: Submit) -> None:
        if self.draining:
            raise _Refused(RejectReason.REJECT_REASON_DRAINING)
        if len(engine.scheduler.waiting) >= self._max_waiting:
            raise _Refused(RejectReason.REJECT_REASON_BUSY)
        if link not in self._links or submit.handle in link.sequences:
            raise _Refused(RejectReason.REJECT_REASON_INVALID)
        try:
            sequence_id = engine.submit(self._engine_request(submit))
        except CapacityError as error:
            raise _Refused(RejectReason.REJECT_REASON_TOO_LARGE) from error
        except ValueError as error:
            raise _Refused(RejectReason.REJECT_REASON_INVALID) from error
        link.sequences[submit.handle] = sequence_id
        self._routes[sequence_id] = _Route(link, submit.handle, submit.request_id)

    def _engine_request(self, submit: Submit) -> EngineRequest:
        """Raises ValueError for anything that a router of ours would not send."""
        token_ids = unpack_tokens(submit.token_ids)
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise ValueError("token ids must be within the vocabulary")
        names = [BlockName(name) for name in split_names(submit.block_names)]
        if not 1 <= len(names) <= 1 + submit.prompt_tokens // self._hello.block_size:
            raise ValueError(f"{len(names)} names of {NAME_BYTES} bytes for {submit.prompt_tokens} tokens")
        sampling = submit.sampling
        return EngineRequest(
            token_ids=token_ids,
            prompt_length=submit.prompt_tokens,
            names=names,
            sampling=SamplingParams(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                min_tokens=sampling.min_tokens,
                seed=sampling.seed,
                stop_token_ids=frozenset(sampling.stop_token_ids),
                eos_token_ids=frozenset(sampling.eos_token_ids),
            ),
            deadline_seconds=submit.deadline_seconds or None,
        )

    def _cancel(self, link: _Link, handle: int, engine: Engine) -> None:
        sequence_id = link.sequences.pop(handle, None)
        if sequence_id is not None:
            engine.cancel(sequence_id)
            self._routes.pop(sequence_id, None)

    def _cancel_all(self, link: _Link, engine: Engine) -> None:
        for handle in tuple(link.sequences):
            self._cancel(link, handle, engine)

    async def _get_block_pool(self, data: bytes, context: Context) -> cluster_pb2.BlockPool:
        await self._check_secret(context)
        await _parse(cluster_pb2.GetBlockPoolRequest, data, context)
        return await self.block_pool()

    async def block_pool(self) -> cluster_pb2.BlockPool:
        """The pool as it is between two steps."""
        hello = self._hello
        snapshot = await asyncio.wrap_future(self._engine.call(take_snapshot))
        return await asyncio.to_thread(
            pool_message, snapshot, worker_id=hello.worker_id, incarnation=hello.incarnation
        )

    async def _list_blocks(self, data: bytes, context: Context) -> cluster_pb2.ListBlocksResponse:
        await self._check_secret(context)
        request = await _parse(cluster_pb2.ListBlocksRequest, data, context)
        size = request.page_size or DEFAULT_PAGE_SIZE
        start = self._page_start(request.page_token)
        if size > MAX_PAGE_SIZE or start is None:
            what = (
                "page_size is above 1000"
                if size > MAX_PAGE_SIZE
                else "page_token is not one of this worker's"
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
        assert start is not None
        blocks = await asyncio.wrap_future(
            self._engine.call(
                lambda engine: block_messages(
                    engine, start, size, {key: route.request_id for key, route in self._routes.items()}
                )
            )
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
        try:
            incarnation, _, start = base64.urlsafe_b64decode(token).decode().rpartition(":")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return None
        valid = incarnation == self._hello.incarnation and start.isdecimal()
        return int(start) if valid and int(start) < self._hello.total_blocks else None


async def _parse(kind: type[M], data: bytes, context: Context) -> M:
    try:
        return kind.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"this is no {kind.DESCRIPTOR.name}")
        raise
