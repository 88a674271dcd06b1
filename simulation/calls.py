"""gRPC's client calls and server handlers over wires in memory: the same methods, the same errors.

An EngineLink opens a `MemoryChannel`. A worker's address answers with a `Listener`, which runs the service's real
handlers in the worker's process. Messages are serialised. Owns the effects of a dead process, a hang-up and a full
window on either side. Does not own delays and cuts (network.py).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from grpc.aio import EOF, AioRpcError, Metadata

from simulation.network import Network, Wire
from simulation.virtual_time import Process

UNREAD_MESSAGES = 4
"""Messages in flight to a client. Beyond it the server's writes wait, as behind a small receive window."""
HANG_UP = object()


@dataclass(frozen=True, slots=True)
class End:
    """The last message of a server: the status with which the call ends."""

    code: grpc.StatusCode


class Aborted(Exception):
    """Raised by `context.abort`."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(slots=True)
class ServerContext:
    """The part of a ServicerContext that our handlers use."""

    metadata: tuple[tuple[str, str], ...]

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise Aborted(code)

    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"


@dataclass(frozen=True, slots=True)
class CallDetails:
    """The part of grpc.HandlerCallDetails that a generic handler reads."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Listener:
    """A process that serves at an address."""

    process: Process
    handler: grpc.GenericRpcHandler


class Connections:
    """All listeners by address, and all open calls."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.listeners: dict[str, Listener] = {}
        self.calls: list[Call] = []
        self.on_message: Callable[[str, str, str, bytes], None] = lambda host, address, way, data: None

    def died(self, process: Process) -> None:
        """Close what a dead process had open, as a kernel does. Messages in flight may be lost."""
        for address, listener in tuple(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
        for call in tuple(self.calls):
            is_torn = self.network.chance.random() < 0.5
            if call.server is process:
                call.end(grpc.StatusCode.UNAVAILABLE, is_torn=is_torn)
            elif call.client is process:
                call.hang_up(is_torn=is_torn)

    def reset(self, host: str, address: str) -> None:
        """End every call from this host to this address. Both ends see it."""
        for call in tuple(self.calls):
            if (call.client.name, call.address) == (host, address):
                call.reset()


class Call:
    """One call, with both its halves. The client's half has the methods of a grpc.aio call."""

    def __init__(
        self,
        connections: Connections,
        client: Process,
        address: str,
        method: str,
        metadata: tuple[tuple[str, str], ...],
        *,
        serialise: Callable[[Any], bytes],
        deserialise: Callable[[bytes], Any],
    ) -> None:
        network = connections.network
        path = network.path(client.name, address)
        self.client, self.address = client, address
        self.server: Process | None = None
        self._connections = connections
        self._method, self._metadata = method, metadata
        self._serialise, self._deserialise = serialise, deserialise
        self._up = Wire(network, path, is_up=True, deliver=self._at_server)
        self._down = Wire(network, path, is_up=False, deliver=self._at_client)
        self._replies: asyncio.Queue[bytes | End] = asyncio.Queue()
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._status: grpc.StatusCode | None = None
        self._ended = asyncio.Event()
        self._has_window = asyncio.Event()
        self._is_cancelled = self._is_server_done = False
        self._serving: asyncio.Task[None] | None = None
        self._path = path
        path.on_dead.append(self._found_dead)
        connections.calls.append(self)
        self._up.send(None)

    # The client's half

    def done(self) -> bool:
        return self._status is not None

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._is_cancelled = True
        self._finish(grpc.StatusCode.CANCELLED)
        self.hang_up(is_torn=False)
        return True

    async def code(self) -> grpc.StatusCode:
        await self._ended.wait()
        assert self._status is not None
        return self._status

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._up.send(self._serialise(message))
        await asyncio.sleep(0)

    async def read(self) -> Any:
        if self._status is not None:
            self._raise_for_status()
            return EOF
        try:
            item = await self._replies.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._has_window.set()
        if isinstance(item, End):
            self._finish(item.code)
            self._raise_for_status()
            return EOF
        return self._deserialise(item)

    def _raise_for_status(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._status is not grpc.StatusCode.OK:
            assert self._status is not None
            raise AioRpcError(self._status, Metadata(), Metadata())

    def _finish(self, code: grpc.StatusCode) -> None:
        if self._status is None:
            self._status = code
            self._ended.set()

    def _at_client(self, item: bytes | End) -> None:
        if self._status is not None:
            return
        if isinstance(item, End):
            self._forget()
        else:
            self._connections.on_message(self.client.name, self.address, "down", item)
        self._replies.put_nowait(item)

    # Both halves

    def hang_up(self, *, is_torn: bool) -> None:
        """Tell the server that the client has gone. `is_torn` loses the messages in flight."""
        if is_torn:
            self._up.tear()
        self._up.send(HANG_UP)

    def end(self, code: grpc.StatusCode, *, is_torn: bool = False) -> None:
        """Send the client the status that ends the call. `is_torn` loses the messages in flight."""
        self._is_server_done = True
        self._has_window.set()
        if is_torn:
            self._down.tear()
        self._down.send(End(code))

    def reset(self) -> None:
        self._stop_serving()
        self.end(grpc.StatusCode.UNAVAILABLE, is_torn=True)

    def _found_dead(self) -> None:
        """End the call if a server has it, because keepalive found its path dead. Only servers use keepalive: clients
        watch for silence."""
        if self.server is not None and not self._is_server_done:
            self.reset()

    def _forget(self) -> None:
        self._up.close()
        self._down.close()
        if self in self._connections.calls:
            self._connections.calls.remove(self)
        if self._found_dead in self._path.on_dead:
            self._path.on_dead.remove(self._found_dead)

    # The server's half

    def _at_server(self, item: object) -> None:
        if item is HANG_UP:
            self._stop_serving()
            self._forget()
        elif item is None:
            self._open()
        elif self.server is not None and not self._is_server_done:
            assert isinstance(item, bytes)
            self._connections.on_message(self.client.name, self.address, "up", item)
            self._requests.put_nowait(item)

    def _open(self) -> None:
        listener = self._connections.listeners.get(self.address)
        if listener is None:
            self.end(grpc.StatusCode.UNAVAILABLE)
            return
        self.server = listener.process
        found = listener.handler.service(CallDetails(self._method, self._metadata))  # type: ignore[arg-type]
        if found is None:
            self.end(grpc.StatusCode.UNIMPLEMENTED)
            return
        self._serving = self.server.start(self._serve(found))

    def _stop_serving(self) -> None:
        self._requests.put_nowait(None)
        if self._serving is not None:
            self._serving.cancel()

    async def _serve(self, handler: Any) -> None:
        code = grpc.StatusCode.OK
        try:
            await (self._serve_stream(handler) if handler.response_streaming else self._serve_one(handler))
        except Aborted as aborted:
            code = aborted.code
        except asyncio.CancelledError:
            return
        if not self._is_server_done:
            self.end(code)

    async def _serve_stream(self, handler: Any) -> None:
        responses: AsyncGenerator[Any, None] = handler.stream_stream(
            self._all_requests(), ServerContext(self._metadata)
        )
        async with aclosing(responses):
            async for response in responses:
                while len(self._down) + self._replies.qsize() >= UNREAD_MESSAGES and not self._is_server_done:
                    self._has_window.clear()
                    await self._has_window.wait()
                self._respond(handler, response)

    async def _serve_one(self, handler: Any) -> None:
        request = await self._requests.get()
        if request is not None:
            self._respond(handler, await handler.unary_unary(request, ServerContext(self._metadata)))

    def _respond(self, handler: Any, response: Any) -> None:
        if not self._is_server_done:
            self._down.send(handler.response_serializer(response))

    async def _all_requests(self) -> AsyncGenerator[bytes, None]:
        while (request := await self._requests.get()) is not None:
            yield request


class UnaryCall:
    """A call with one reply: awaitable, with a deadline."""

    def __init__(self, call: Call, request: Any, timeout_seconds: float | None) -> None:
        self._call, self._request, self._timeout_seconds = call, request, timeout_seconds

    def __await__(self) -> Generator[Any, None, Any]:
        return self._run().__await__()

    async def _run(self) -> Any:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._call.write(self._request)
                return await self._call.read()
        except TimeoutError:
            raise AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata()) from None
        finally:
            self._call.cancel()


class MemoryChannel:
    """The part of grpc.aio.Channel that a generated stub and an EngineLink use."""

    def __init__(self, connections: Connections, client: Process, address: str) -> None:
        self._connections, self._client, self._address = connections, client, address

    async def __aenter__(self) -> "MemoryChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close nothing: the caller ends each call itself."""

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: object
    ) -> Callable[..., Call]:
        def start(metadata: tuple[tuple[str, str], ...] = ()) -> Call:
            return Call(
                self._connections,
                self._client,
                self._address,
                method,
                metadata,
                serialise=request_serializer,
                deserialise=response_deserializer,
            )

        return start

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: object
    ) -> Callable[..., Awaitable[Any]]:
        stream = self.stream_stream(method, request_serializer, response_deserializer)

        def start(
            request: Any, timeout: float | None = None, metadata: tuple[tuple[str, str], ...] = ()
        ) -> UnaryCall:
            return UnaryCall(stream(metadata), request, timeout)

        return start
