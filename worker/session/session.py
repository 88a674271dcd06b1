"""Session service: serves the streams of routers from one engine.

Owns what waits to be sent to each router. A slow router only sees older data: what it has not taken yet is merged. So
an outbox never holds more rows than its requests have outputs. The engine never waits for a stream. The end of a stream
cancels its requests.

Does not own the routes of requests (router_streams.py), the checks of a Submit (submits.py) or the wait for a grammar
(compiling.py). Nor does it own merging (outbox.py) or the drain (draining.py).

Threads: `_routes` and `_taken` are used on the engine's thread only. Everything else is changed on the loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from blockyard.proto.naming.block_hash import NAME_BYTES, split_names
from blockyard.proto.runtime.logs import about
from blockyard.proto.runtime.tasks import running
from blockyard.proto.v1 import session_pb2
from blockyard.proto.v1.cluster_pb2 import WorkerIndex
from blockyard.proto.v1.session_pb2 import (
    Cancel,
    Hello,
    PullReport,
    RejectReason,
    Room,
    Submit,
    ToRouter,
    ToWorker,
)
from blockyard.worker.cache.adapter_book import UnknownAdapter
from blockyard.worker.engine import Engine
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.engine_types import EngineLoad, EngineRequest, SequenceOutput, StepResult
from blockyard.worker.inspection.inspection import Inspection
from blockyard.worker.inspection.pool_view import load_message
from blockyard.worker.scheduling.background import num_before
from blockyard.worker.scheduling.scheduler import CapacityError
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.phases import Phase
from blockyard.worker.session.arrivals import Arrivals
from blockyard.worker.session.compiling import CompileGrammar, Compiling
from blockyard.worker.session.router_streams import Link, Route, Routes, report_seconds
from blockyard.worker.session.submits import Refused, engine_request
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from blockyard.worker.inspection.parsing import Context

logger = logging.getLogger(__name__)

ARRIVAL_SECONDS_A_ROUTER = 0.00025
"""Least time between two messages that tell a router of arrivals, for each router: 4,000 messages a second in all."""
IDLE_CHECK_SECONDS = 0.5
"""A request that is cancelled before any step has it ends without a step, so idleness is checked now and then."""


class _BadMessage(Exception):
    """The router sent what none of our routers would send. The text says what."""


class SessionService:
    """Implements the gRPC service EngineService over one engine thread. Made and used on one event loop."""

    def __init__(
        self,
        *,
        hello: Hello,
        vocab_size: int,
        max_waiting: int,
        compile_grammar: CompileGrammar | None = None,
    ) -> None:
        """Without `compile_grammar` structured output is refused."""
        self._hello = hello
        self._vocab_size = vocab_size
        self._max_waiting = max_waiting
        self._compile_grammar = compile_grammar
        self._routes = Routes(withdraw=partial(self._on_loop, self._withdraw))
        self._links: dict[Link, None] = {}
        self._loop = asyncio.get_running_loop()
        self._engine: EngineThread
        self._load: EngineLoad
        self.inspection = Inspection(hello=hello, request_ids=self._client_request_ids)
        self.on_changes: Callable[[StepResult], None] = lambda result: None
        self.index_part: Callable[[], WorkerIndex | None] = lambda: None
        """Returns what routers see of this worker's part of the prefix index."""
        self.measure_link: Callable[[str, str], object] = lambda address, incarnation: None
        """Measures the link from the worker with this transfer address and incarnation."""
        self.is_draining = False
        """Whether new requests are refused. Set by `set_draining`."""
        self._is_closing = False
        self._arrivals = Arrivals(hello.block_size)
        self._room = Room()
        """Room on other workers, as a router has told it last."""
        self._taken: list[int] = []
        """Tokens to compute of each request that the engine has taken since its last step. Changed on its thread."""
        self._has_stepped = asyncio.Event()
        """Set when outputs of a step have arrived on the event loop, or nothing runs or waits any more.

        A step without outputs, in which all wait for their pulls, does not count: the question whether the engine is
        idle would begin the next one at once.
        """

    def attach(self, engine: EngineThread, load: EngineLoad) -> None:
        """Give the service its engine. The engine must call `on_step`."""
        self._engine, self._load = engine, load
        if self._is_for_prefill:
            engine.call(partial(_lend_all, True))
        self.inspection.attach(engine)

    @property
    def _is_for_prefill(self) -> bool:
        """Return whether other workers fetch nearly all that this one computes."""
        return self._hello.role == "prefill"

    @property
    def _reported_load(self) -> EngineLoad:
        """Return the load for routers: that of the engine, and the requests that it has not taken yet."""
        return self._arrivals.added_to(self._load)

    @property
    def load(self) -> EngineLoad:
        """The engine's load as of the last step."""
        return self._load

    def handler(
        self, more_methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]] | None = None
    ) -> grpc.GenericRpcHandler:
        """Return the handler of all methods. They take raw bytes.

        So a message that does not parse gets INVALID_ARGUMENT, where gRPC itself would say UNKNOWN.
        """
        session: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self._session, response_serializer=ToRouter.SerializeToString
        )
        methods = {**self.inspection.methods(), **(more_methods or {}), "Session": session}
        name = session_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
        return grpc.method_handlers_generic_handler(name, methods)

    def set_draining(self, is_draining: bool) -> None:
        """Refuse new requests from now on, or accept them again, and tell all routers.

        A drain rejects the requests that wait for their grammar, which have not begun.
        """
        if is_draining is self.is_draining:
            return
        self.is_draining = self._hello.is_draining = is_draining
        if not is_draining:
            self._engine.call(partial(_lend_all, self._is_for_prefill))
        for link in self._links:
            link.tell_draining(is_draining)
            for handle in link.compiling.cancel_all() if is_draining else ():
                link.reject(handle, RejectReason.REJECT_REASON_DRAINING)

    async def until_idle(self) -> None:
        """Wait until the engine has no request that runs or waits. While draining, no new one comes."""
        while True:
            self._has_stepped.clear()
            if not await asyncio.wrap_future(self._engine.call(lambda _: bool(self._routes))):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_CHECK_SECONDS):
                    await self._has_stepped.wait()

    async def hand_over(self) -> int:
        """End all requests as DRAINING, each after its tokens so far. Return how many: routers place them elsewhere.

        Other workers may fetch the blocks of all of them at once.
        """
        return await asyncio.wrap_future(self._engine.call(self._end_all))

    def _end_all(self, engine: Engine) -> int:
        ended = self._routes.end(tuple(self._routes), engine)
        _lend_all(True, engine)
        # Queued behind the results of the last step, which take the same way.
        self._on_loop(self._give_back, ended, RejectReason.REJECT_REASON_DRAINING)
        return len(ended)

    @staticmethod
    def _give_back(routes: list[Route], reason: RejectReason) -> None:
        for route in routes:
            route.link.outbox.fail(route.handle, reason)
            route.link.has_news.set()

    def _hand_over_begun(self, begun: set[RequestId], engine: Engine) -> None:
        """End requests whose prompt is computed, so that other workers continue them."""
        # Queued behind their tokens.
        self._on_loop(
            self._give_back, self._routes.end(begun, engine), RejectReason.REJECT_REASON_HANDED_OVER
        )

    def pull_ended(self, request_id: RequestId, report: PullReport) -> None:
        """Report a pull to the router of its request. The engine's thread calls this."""
        route = self._routes.get(request_id)
        if route is not None:
            report.handle = route.handle
            self._on_loop(self._report_pull, route, report)

    @staticmethod
    def _report_pull(route: Route, report: PullReport) -> None:
        route.link.outbox.report_pull(report)
        route.link.has_news.set()

    @property
    def has_routers(self) -> bool:
        return bool(self._links)

    def end_streams(self) -> None:
        """End each stream once its router has taken what waits for it. No new stream begins."""
        self._is_closing = True
        for link in self._links:
            link.has_news.set()

    def _client_request_ids(self) -> dict[RequestId, str]:
        return self._routes.client_request_ids()

    def on_step(self, result: StepResult, load: EngineLoad) -> None:
        """Queue a step's results for the routers. The engine's thread calls this."""
        phases = self._routes.phases_of(result)
        news, begun = self._routes.outputs_of(result)
        taken, self._taken = self._taken, []
        self._on_loop(self._deliver, news, phases, result, load, taken)
        if begun:
            self._engine.call(partial(self._hand_over_begun, begun))

    def _on_loop(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no router is left
            self._loop.call_soon_threadsafe(call, *arguments)

    def _deliver(
        self,
        news: list[tuple[Route, SequenceOutput]],
        phases: list[tuple[Route, Phase]],
        result: StepResult,
        load: EngineLoad,
        taken: list[int],
    ) -> None:
        self._load = load
        for tokens in taken:
            self._arrivals.taken(tokens)
        for route, output in news:
            route.link.outbox.add(route.handle, output)
            route.link.has_news.set()
        for route, phase in phases:
            route.link.outbox.report_phase(route.handle, phase)
            route.link.has_news.set()
        self._tell_load()
        if news or not (load.running or load.waiting):
            self._has_stepped.set()
        self.on_changes(result)

    def _tell_load(self) -> None:
        """Have all routers hear of the load soon if it has changed."""
        load = self._reported_load
        for link in self._links:
            if load != link.outbox.reported:
                link.tell_load_within(report_seconds(len(self._links), link.asked_report_seconds))

    async def _session(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[ToRouter]:
        link = Link(Compiling(self._compile_grammar))
        self._links[link] = None
        self._hello.load.CopyFrom(load_message(self._reported_load))
        self._hello.stalled_seconds = self._engine.stalled_seconds
        try:
            async with running(self._read(requests, link), name="session reader") as reader:
                reader.add_done_callback(lambda _: link.has_news.set())
                yield ToRouter(hello=self._hello)
                while not reader.done() and not self._is_closing:
                    for message in link.take(self._reported_load):
                        yield message
                    await link.has_news.wait()
                for message in link.take(self._reported_load):
                    yield message
        except _BadMessage as bad:
            # Abort here, not in the reader: an abort beside a send under way may never reach the router.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(bad))
        finally:
            link.compiling.cancel_all()
            self._links.pop(link, None)
            self._tell_room(Room())
            self._engine.call(partial(self._routes.cancel_all, link))
            await link.compiling.aclose()

    async def _read(self, requests: AsyncIterator[bytes], link: Link) -> None:
        async for data in requests:
            try:
                message = ToWorker.FromString(data)
            except DecodeError as error:
                raise _BadMessage("the message is not a valid ToWorker") from error
            match message.WhichOneof("message"):
                case "submit" if message.submit.sampling.HasField("structured_output"):
                    self._compile_first(link, message.submit)
                case "submit":
                    self._submit(link, message.submit, self._loop.time())
                case "cancel":
                    self._take_cancel(link, message.cancel)
                case "ping":
                    link.asked_report_seconds = message.ping.report_seconds
                    self._tell_room(message.ping.room_elsewhere)
                    link.outbox.answer_ping(
                        message.ping.nonce,
                        self._reported_load,
                        self.index_part(),
                        stalled_seconds=self._engine.stalled_seconds,
                        is_draining=self.is_draining,
                    )
                    link.has_news.set()
                case "measure_link":
                    self.measure_link(message.measure_link.address, message.measure_link.incarnation)
                case None if not data:
                    raise _BadMessage("the message is empty")
                case None:
                    pass  # a kind that a newer router knows

    def _tell_room(self, room: Room) -> None:
        """Tell the engine where preempted sequences may move, if that has changed. An empty room is none."""
        if room != self._room:
            self._room = room
            self._engine.call(
                lambda engine: engine.note_room(
                    room.blocks, room.pull_setup_seconds, room.pull_bytes_per_second
                )
            )

    def _compile_first(self, link: Link, submit: Submit) -> None:
        refuse = partial(link.reject, submit.handle)
        try:
            request = self._compilable(link, submit)
        except Refused as refused:
            refuse(refused.reason)
            return
        wanted = submit.sampling.structured_output
        link.compiling.start(
            submit.handle,
            request,
            wanted,
            client=submit.client,
            then=partial(self._submit, link, submit, self._loop.time()),
            refuse=refuse,
        )

    def _compilable(self, link: Link, submit: Submit) -> EngineRequest:
        if self.is_draining:
            raise Refused(RejectReason.REJECT_REASON_DRAINING)
        if sum(len(other.compiling) for other in self._links) >= self._max_waiting:
            raise Refused(RejectReason.REJECT_REASON_BUSY)
        if submit.handle in link.compiling:
            raise Refused(RejectReason.REJECT_REASON_INVALID)
        return self._engine_request(submit)

    def _submit(
        self, link: Link, submit: Submit, reached_at: float, request: EngineRequest | None = None
    ) -> None:
        """Submit a request on the engine's thread, or reject it.

        `reached_at` is when it reached the worker, on the event loop's clock. `request` is the checked content of
        `submit`. Where it is None, the engine's thread checks it.
        """

        def run(engine: Engine) -> None:
            try:
                request_id = self._start(engine, link, submit, request, packed)
                if submit.wants_phases:
                    engine.watch(request_id, seconds_here=self._loop.time() - reached_at)
            except Refused as refused:
                reason = refused.reason
            except Exception:
                with about(submit.request_id):
                    logger.exception("a submit failed")
                reason = RejectReason.REJECT_REASON_INTERNAL
            else:
                self._taken.append(tokens)
                return
            self._on_loop(self._arrivals.taken, tokens)
            self._on_loop(self._withdraw, packed)
            self._on_loop(link.reject, submit.handle, reason)

        link.outbox.last_handle = max(link.outbox.last_handle, submit.handle)
        packed, tokens = self._arrived(link, submit)
        self._engine.call(run)

    def _arrived(self, link: Link, submit: Submit) -> tuple[bytes, int]:
        """Count a request in the reported load, and tell all routers of its prefix. Return its marks, and its tokens to
        compute."""
        prompt_tokens = min(submit.prompt_tokens, self._hello.max_model_len)
        most_bytes = NAME_BYTES * (1 + prompt_tokens // self._hello.block_size)
        num_bytes = min(len(submit.block_names), most_bytes) // NAME_BYTES * NAME_BYTES
        packed, tokens = self._arrivals.add(split_names(submit.block_names[:num_bytes])[1:], prompt_tokens)
        every_seconds = ARRIVAL_SECONDS_A_ROUTER * len(self._links)
        for other in self._links if packed and not self.is_draining else ():
            other.tell_arrival(packed, is_own=other is link, every_seconds=every_seconds)
        self._tell_load()
        return packed, tokens

    def _withdraw(self, packed: bytes) -> None:
        """Have all routers forget the marks of a prompt that has ended before it was computed."""
        gone = self._arrivals.withdraw(packed)
        for link in self._links if gone else ():
            link.outbox.tell_withdrawal(gone)

    def _start(
        self, engine: Engine, link: Link, submit: Submit, request: EngineRequest | None, packed: bytes
    ) -> RequestId:
        if self.is_draining:
            raise Refused(RejectReason.REJECT_REASON_DRAINING)
        if num_before(engine.scheduler.waiting, submit.priority) >= self._max_waiting:
            raise Refused(RejectReason.REJECT_REASON_BUSY)
        if link not in self._links or submit.handle in link.requests:
            raise Refused(RejectReason.REJECT_REASON_INVALID)
        try:
            request_id = engine.submit(request or self._engine_request(submit))
        except CapacityError as error:
            raise Refused(RejectReason.REJECT_REASON_TOO_LARGE) from error
        except UnknownAdapter as error:
            raise Refused(RejectReason.REJECT_REASON_ADAPTER) from error
        except ValueError as error:
            raise Refused(RejectReason.REJECT_REASON_INVALID) from error
        self._routes.add(request_id, Route(link, submit.handle, submit.request_id, packed, submit.hands_over))
        return request_id

    def _engine_request(self, submit: Submit) -> EngineRequest:
        """Return the checked content of a submit. Raises Refused."""
        try:
            return engine_request(
                submit,
                vocab_size=self._vocab_size,
                block_size=self._hello.block_size,
                max_model_len=self._hello.max_model_len,
            )
        except ValueError as error:
            raise Refused(RejectReason.REJECT_REASON_INVALID) from error

    def _take_cancel(self, link: Link, cancel: Cancel) -> None:
        index = cancel.index if cancel.HasField("index") else None
        if index is None:
            link.compiling.cancel(cancel.handle)
        end = partial(self._routes.cancel, link, cancel.handle, index)
        link.compiling.afterwards(cancel.handle, partial(self._engine.call, end))


def _lend_all(is_on: bool, engine: Engine) -> None:
    engine.lends_all = is_on
