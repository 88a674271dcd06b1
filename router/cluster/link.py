"""Engine link: the router's one long-lived stream to one worker.

The link connects, checks the worker, keeps the stream alive, routes messages, and reconnects. When a stream ends, the
sink of every open request (events.py) gets `Lost`, and the relay places the request again. Any message shows
that the worker is alive. The link ends a stream that is silent for too long, because a hung process keeps its
connections open. It also ends the stream of a worker whose engine makes no progress.

Does not own the content of a step (events.py), the worker's state (view.py) or a request's life (generation/relay.py).
"""

import asyncio
import logging
import random
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import grpc
from blockyard.proto.limits import MAX_MESSAGE_BYTES, MAX_RESPONSE_BYTES
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.proto.v1.session_pb2_grpc import EngineServiceStub
from blockyard.router.cluster.events import Lost, OpenRequests, Refused, Sink, events_of
from google.protobuf.message import Message

logger = logging.getLogger(__name__)

PING_SECONDS = 0.5
PAUSE_SECONDS = 0.1
"""A timer that is later than this tells of a pause of the whole process."""
LEAST_SLEEP_SECONDS = 0.001
"""Lower bound of a sleep. With a shorter one, the loop of `_watch` could spin without the clock advancing."""
HELLO_SECONDS = 5.0
"""A process that accepts connections but sends nothing is hung or not a worker."""
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 2.0
ROWS_PER_TICK = 8
"""Rows routed in one tick of the event loop. Each is turned into text, and over HTTP written, before the next.

When a row took 0.1 ms, all rows of 256 streams at once blocked the loop, and so all other streams, for 21 ms. With 32
per tick it was 10 ms, with 8 it was 6 ms.
"""
INSPECT_SECONDS = 2.0
"""Deadline of a call that asks a worker about its pool or sequences."""

CHANNEL_OPTIONS = (
    # One message may carry prompt log-probabilities of several requests.
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A fresh connection for each stream: a shared one might be half-open.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # A router that reads slowly must slow down the worker's writes, because the worker merges the steps that wait. By
    # default gRPC prevents this: it widens the window by measured bandwidth to megabytes, which is thousands of old
    # steps.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16 * 1024),
)


_Call = grpc.aio.StreamStreamCall[session_pb2.ToWorker, session_pb2.ToRouter]
OpenChannel = Callable[[str], grpc.aio.Channel]
"""Opens a connection to a worker's address."""


def open_insecure_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class LinkEvents:
    """Notifications of a link to its owner, which overrides all of them. Each names the worker by its address."""

    def accept(self, address: str, hello: session_pb2.Hello) -> str | None:
        """Return why this worker must not be used, or None to accept it."""
        raise NotImplementedError

    def heard(
        self, address: str, load: cluster_pb2.WorkerLoad | None, last_handle: int | None = None
    ) -> None:
        """A message has come, maybe with a load. The load counts the requests up to `last_handle`, or all if it is
        None."""
        raise NotImplementedError

    def arrived(self, address: str, marks: bytes, withdrawn_marks: bytes) -> None:
        """Prompts with these marks have reached the worker, and those with `withdrawn_marks` have ended there
        uncomputed."""
        raise NotImplementedError

    def draining(self, address: str, is_draining: bool) -> None:
        raise NotImplementedError

    def index_reported(self, address: str, index: cluster_pb2.WorkerIndex) -> None:
        raise NotImplementedError

    def disconnected(self, address: str, reason: str) -> None:
        raise NotImplementedError

    @property
    def report_seconds(self) -> float:
        """Time between reports of load alone to ask workers for. 0: as often as they like."""
        return 0.0

    def room_elsewhere(self, address: str) -> session_pb2.Room | None:
        """Return where preempted sequences of this worker may move, or None."""
        return None


class StreamOver(Exception):
    """Raised in one task of a stream to end all of them. Its text is the reason that operators see."""


class NoDeath(StreamOver):
    """The stream is over, but the worker is not known to have died: it is silent, or ended the stream with status
    OK."""


class EngineLink:
    """Link to one worker. `run` keeps it up until it is cancelled. The other methods may be called at any time."""

    def __init__(
        self,
        address: str,
        events: LinkEvents,
        *,
        lost_seconds: float,
        stall_seconds: float = inf,
        clock: Callable[[], float] = time.monotonic,
        open_channel: OpenChannel = open_insecure_channel,
        rng: random.Random | None = None,
    ) -> None:
        """The link ends a stream after `lost_seconds` of silence. It also does if the engine has work but finishes no
        step for `stall_seconds`."""
        self.address = address
        self._events = events
        self._lost_seconds = lost_seconds
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._open_channel = open_channel
        self._rng = rng or random.Random()
        self._open = OpenRequests()
        self._next_handle = 0
        self._outgoing: asyncio.Queue[session_pb2.ToWorker] | None = None
        self._stub: EngineServiceStub | None = None
        self._last_heard = 0.0
        self._nonce = 0
        self._is_stopped = False
        self._has_failed = False

    @property
    def is_up(self) -> bool:
        """True while the stream to an accepted worker runs."""
        return self._outgoing is not None

    @property
    def has_failed(self) -> bool:
        """True if the last attempt to connect failed. It is still False right after an accepted connection ends."""
        return self._has_failed and not self.is_up

    async def run(self) -> None:
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while True:
            was_up, reason = await self._one_stream()
            self._has_failed = not was_up
            if self._is_stopped:
                return
            self._events.disconnected(self.address, reason)
            if was_up:
                logger.warning("lost worker at %s: %s", self.address, reason)
                backoff_seconds = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff_seconds * self._rng.uniform(0.5, 1.0))
            backoff_seconds = min(backoff_seconds * 2, LAST_BACKOFF_SECONDS)

    def stop(self) -> None:
        """Prepare the end of `run`; call it before cancelling `run`.

        Without it, a task group whose child fails at the moment of cancellation reports the failure and drops the
        cancellation.
        """
        self._is_stopped = True

    def submit(self, submit: session_pb2.Submit, sink: Sink, outputs: Iterable[int] = (0,)) -> int:
        """Send a request and return its handle, a new number on the stream. `sink` gets the events of these outputs.

        On a link that is down, the sink gets `Lost` at once.
        """
        self._next_handle += 1
        handle = self._next_handle
        submit.handle = handle
        if self._outgoing is None:
            sink(Lost(was_sent=False))
        else:
            self._open.add(handle, sink, outputs)
            self._outgoing.put_nowait(session_pb2.ToWorker(submit=submit))
        return handle

    def cancel(self, handle: int, index: int | None = None) -> None:
        """Cancel a request, whose sink then gets nothing more, or one of its outputs.

        The sink may still get events of that one output. An unknown or ended handle is ignored.
        """
        must_send, index = self._open.cancel(handle, index)
        if must_send and self._outgoing is not None:
            cancel = session_pb2.Cancel(handle=handle, index=index)
            self._outgoing.put_nowait(session_pb2.ToWorker(cancel=cancel))

    def measure_link(self, address: str, incarnation: str) -> None:
        """Ask the worker to measure how fast blocks reach it from the worker at this transfer address."""
        if self._outgoing is not None:
            measure = session_pb2.MeasureLink(address=address, incarnation=incarnation)
            self._outgoing.put_nowait(session_pb2.ToWorker(measure_link=measure))

    async def block_pool(self, request: cluster_pb2.GetBlockPoolRequest) -> cluster_pb2.BlockPool:
        """Ask the worker for its block pool. Raises grpc.aio.AioRpcError, or ConnectionError if the link is down."""
        pool: cluster_pb2.BlockPool = await self.call("GetBlockPool", request, INSPECT_SECONDS)
        return pool

    async def list_blocks(self, request: cluster_pb2.ListBlocksRequest) -> cluster_pb2.ListBlocksResponse:
        """Ask the worker for one page of its blocks. Raises grpc.aio.AioRpcError, or ConnectionError if the link is
        down."""
        page: cluster_pb2.ListBlocksResponse = await self.call("ListBlocks", request, INSPECT_SECONDS)
        return page

    async def find_blocks(self, request: cluster_pb2.FindBlocksRequest) -> cluster_pb2.FindBlocksResponse:
        """Ask the worker for blocks by number or name. Raises grpc.aio.AioRpcError, or ConnectionError if the link is
        down."""
        found: cluster_pb2.FindBlocksResponse = await self.call("FindBlocks", request, INSPECT_SECONDS)
        return found

    async def list_sequences(
        self, request: cluster_pb2.ListSequencesRequest
    ) -> cluster_pb2.ListSequencesResponse:
        """Ask the worker for one page of its sequences. Raises grpc.aio.AioRpcError, or ConnectionError if the link is
        down."""
        page: cluster_pb2.ListSequencesResponse = await self.call("ListSequences", request, INSPECT_SECONDS)
        return page

    async def call(self, method: str, request: Message, timeout_seconds: float) -> Any:
        """Call any method of the worker's EngineService except Session, and return its response.

        Raises grpc.aio.AioRpcError, or ConnectionError if the link is down or goes down during the call.
        """
        call = getattr(self._connected_stub(), method)
        try:
            return await call(request, timeout=timeout_seconds)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The channel has been closed and has cancelled the call.
            raise ConnectionError("the worker is not connected any more") from None

    def _connected_stub(self) -> EngineServiceStub:
        if self._stub is None:
            raise ConnectionError("the worker is not connected")
        return self._stub

    async def _one_stream(self) -> tuple[bool, str]:
        """Run one stream to its end. Return whether the worker was accepted on it, and why it ended."""
        was_up, is_death = False, True
        try:
            async with self._open_stream() as call:
                hello = await self._read_hello(call)
                refusal = self._events.accept(self.address, hello)
                if refusal is not None:
                    # Wait for the longest backoff: only a restart of the worker can change the refusal.
                    await asyncio.sleep(LAST_BACKOFF_SECONDS)
                    return False, refusal
                was_up = True
                logger.info("worker %s at %s is up", hello.worker_id, self.address)
                await self._converse(call)
        except grpc.aio.AioRpcError as error:
            return was_up, ended_with(error)
        except BaseExceptionGroup as group:
            reasons = group.subgroup((StreamOver, grpc.aio.AioRpcError))
            if reasons is None or group.split((StreamOver, grpc.aio.AioRpcError))[1] is not None:
                raise
            is_death = group.subgroup(NoDeath) is None
            reason = first_reason(reasons)
            del reasons
            forget_frames(group)
            return was_up, reason
        except StreamOver as over:
            return was_up, str(over)
        finally:
            self._end_all(is_death=is_death)
        return was_up, "the worker closed the stream"

    @asynccontextmanager
    async def _open_stream(self) -> AsyncIterator[_Call]:
        async with self._open_channel(self.address) as channel:
            self._stub = EngineServiceStub(channel)  # type: ignore[no-untyped-call]
            call = self._stub.Session()
            try:
                yield call
            finally:
                self._stub = None
                call.cancel()

    async def _read_hello(self, call: _Call) -> session_pb2.Hello:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                message = await call.read()
        except TimeoutError:
            raise StreamOver("no hello message came") from None
        if not isinstance(message, session_pb2.ToRouter):
            raise StreamOver(f"refused with {(await call.code()).name}")
        if message.WhichOneof("message") != "hello":
            raise StreamOver("the first message was not a hello")
        return message.hello

    async def _converse(self, call: _Call) -> None:
        outgoing: asyncio.Queue[session_pb2.ToWorker] = asyncio.Queue()
        self._outgoing = outgoing
        self._last_heard = self._clock()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(call, outgoing))
            tasks.create_task(self._ping(outgoing))
            tasks.create_task(self._watch())
            tasks.create_task(self._read(call))

    async def _write(self, call: _Call, outgoing: asyncio.Queue[session_pb2.ToWorker]) -> None:
        while True:
            try:
                await call.write(await outgoing.get())
            except asyncio.InvalidStateError:
                raise StreamOver("the worker closed the stream") from None

    async def _ping(self, outgoing: asyncio.Queue[session_pb2.ToWorker]) -> None:
        while True:
            self._nonce += 1
            ping = session_pb2.Ping(
                nonce=self._nonce,
                report_seconds=self._events.report_seconds,
                room_elsewhere=self._events.room_elsewhere(self.address),
            )
            outgoing.put_nowait(session_pb2.ToWorker(ping=ping))
            await asyncio.sleep(min(PING_SECONDS, self._lost_seconds / 4))

    async def _watch(self) -> None:
        """Raise NoDeath as soon as the worker has been silent for `lost_seconds`.

        After a pause of this process, first give the messages that came meanwhile the time to be read.
        """
        while True:
            now = self._clock()
            left_seconds = self._last_heard + self._lost_seconds - now
            if left_seconds <= 0:
                raise NoDeath(f"silent for {self._lost_seconds:g} s")
            await asyncio.sleep(max(left_seconds, LEAST_SLEEP_SECONDS))
            if self._clock() - now - left_seconds > PAUSE_SECONDS:
                await asyncio.sleep(PING_SECONDS)

    async def _read(self, call: _Call) -> None:
        while isinstance(message := await call.read(), session_pb2.ToRouter):
            self._last_heard = self._clock()
            match message.WhichOneof("message"):
                case "step":
                    self._heard_load(message.step)
                    arrived, withdrawn = message.step.arrived_marks, message.step.withdrawn_marks
                    if arrived or withdrawn:
                        self._events.arrived(self.address, arrived, withdrawn)
                    await self._route(message.step)
                case "rejected":
                    self._events.heard(self.address, None)
                    rejected = message.rejected
                    self._open.deal(rejected.handle, Refused(reason=rejected.reason, detail=rejected.detail))
                case "draining":
                    self._events.draining(self.address, message.draining.is_draining)
                    self._events.heard(self.address, None)
                case "pong":
                    if message.pong.stalled_seconds > self._stall_seconds:
                        raise StreamOver(
                            f"its engine has finished no step for {message.pong.stalled_seconds:.0f} s"
                        )
                    if message.pong.HasField("is_draining"):
                        self._events.draining(self.address, message.pong.is_draining)
                    if message.pong.HasField("index"):
                        self._events.index_reported(self.address, message.pong.index)
                    self._heard_load(message.pong)
                case _:
                    self._events.heard(self.address, None)
        code = await call.code()
        how = NoDeath if code is grpc.StatusCode.OK else StreamOver
        raise how(f"the worker ended the stream with {code.name}")

    def _heard_load(self, message: session_pb2.StepOutput | session_pb2.Pong) -> None:
        self._events.heard(
            self.address,
            message.load if message.HasField("load") else None,
            message.last_handle if message.HasField("last_handle") else None,
        )

    async def _route(self, step: session_pb2.StepOutput) -> None:
        """Deliver the rows and failures of a step to their sinks, a few per tick of the event loop."""
        try:
            events = events_of(step)
        except ValueError as error:
            raise StreamOver(f"step: {error}") from None
        for number, (handle, event) in enumerate(events, start=1):
            if number % ROWS_PER_TICK == 0:
                await asyncio.sleep(0)
            self._open.deal(handle, event)

    def _end_all(self, *, is_death: bool) -> None:
        self._outgoing = None
        self._open.end_all(is_death=is_death)


def forget_frames(error: BaseException) -> None:
    """Break the reference cycle between an exception group and its frames.

    The frames refer to the call, whose connection would stay open until the next garbage collection.
    """
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            forget_frames(each)


def first_reason(group: BaseExceptionGroup[BaseException]) -> str:
    error = group.exceptions[0]
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return ended_with(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)


def ended_with(error: grpc.aio.AioRpcError) -> str:
    """Return in words why the stream ended, without any text of the peer."""
    if error.code() is grpc.StatusCode.UNAVAILABLE and "handshake" in (error.details() or "").lower():
        return "the TLS handshake failed: the cluster name, the cluster secret or the certificates differ"
    return f"stream ended with {error.code().name}"
