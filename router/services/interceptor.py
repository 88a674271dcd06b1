"""Interceptors of all gRPC handlers: authentication, parsing, and the one place where exceptions become statuses.

gRPC's own deserialiser answers a malformed message with UNKNOWN and sends the text of an uncaught exception to the
client. So every method on the server is wrapped: its bytes are parsed here, and exceptions go through grpc_status.py.
Cancellation passes through.

Where clients authenticate, AuthInterceptor comes first: a refused call is never read. It sees every method, also
unknown ones and those with a stream of requests. The rules are in admission/auth.py. Code shared with HTTP is in
calls/gate.py.

gRPC itself would wait for a message without a limit. So each method is registered with a stream of requests, and its
one message is read here, within bounds (calls/intake.py).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any, NoReturn

import grpc
from blockyard.proto.limits import MAX_RESPONSE_BYTES
from blockyard.router.calls.bounds import caller_client
from blockyard.router.calls.gate import CallGate, answer_to
from blockyard.router.calls.intake import PROMPT_SECONDS, Intake
from blockyard.router.errors import DeadlinePassed, MalformedMessage, Overloaded, RequestTooLarge, RouterError
from blockyard.router.services.grpc_status import code_of, trailing_metadata
from google.protobuf.message import DecodeError, Message

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
LASTING_METHODS = frozenset(
    {"/grpc.health.v1.Health/Watch", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}
)
"""Calls that last until the client ends them. Only the limits below bound their number."""
MAX_LASTING = 256
"""Most calls of each such method at once."""
MAX_LASTING_A_CLIENT = 32
LASTING_RETRY_SECONDS = 5.0
END_SECONDS = 10.0
"""Longest time from a failed write until gRPC cancels the task of its call."""


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates calls, and refuses those without permission. The handler finds its caller in PRINCIPAL."""

    def __init__(self, gate: CallGate) -> None:
        self._gate = gate

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        try:
            self._gate.admit(handler_call_details.method, handler_call_details.invocation_metadata or ())
        except RouterError as error:
            return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: RouterError) -> Any:
    """Return a handler that refuses any call. On the wire a response without a message is the same for all methods."""

    async def refuse(_: Any, context: Context) -> None:
        await _end(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Wraps methods with one request message or a stream of them.

    A handler with one message must be a coroutine. It writes a stream with `write`.
    """

    def __init__(self, gate: CallGate, intake: Intake, *, message_bytes: int) -> None:
        """`message_bytes` is the largest message that the server reads."""
        self._gate, self._intake, self._message_bytes = gate, intake, message_bytes
        self._num_lasting: Counter[tuple[str, str]] = Counter()
        """Number of lasting calls that run, by method and client. The client "" stands for all clients of a method."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method = handler_call_details.method
        if handler.request_streaming:
            assert handler.response_streaming
            behave = self._bounded(self._of_stream(handler), method)
        elif handler.response_streaming:
            behave = self._bounded(self._of_one(handler.unary_stream, handler.request_deserializer), method)
        else:
            behave = self._bounded(self._of_one(handler.unary_unary, handler.request_deserializer), method)
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(behave, request_deserializer=None, response_serializer=handler.response_serializer)

    def _bounded(self, inner: Callable[[Context], Awaitable[Any]], method: str) -> Behaviour:
        """Return `inner` as a handler whose exceptions become statuses. A lasting method also has a bounded number of
        calls."""

        async def behave(_: AsyncIterator[bytes], context: Context) -> Any:
            try:
                if method not in LASTING_METHODS:
                    return await inner(context)
                with self._lasting(method, caller_client(context.peer())):
                    return await inner(context)
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError as error:
                await self._gate.free(error)
                raise
            except Exception as error:
                try:
                    await _end(context, answer_to(error, method))
                except asyncio.CancelledError as ended:
                    await self._gate.free(ended)
                    raise

        return behave

    def _of_one(self, inner: Behaviour, parse: Callable[[bytes], Any]) -> Callable[[Context], Awaitable[Any]]:
        async def behave(context: Context) -> Any:
            raw = await self._read(context)
            if raw is grpc.aio.EOF:
                # gRPC reports the same for a message too large or broken off, and has ended that call.
                raise MalformedMessage("the call has no message")
            response = await inner(_parsed(parse, raw), context)
            if isinstance(response, Message):
                _check_size(response)
            return response

        return behave

    def _of_stream(self, handler: Any) -> Callable[[Context], Awaitable[None]]:
        """Wrap reflection, the one method with a stream of requests. Its handler is an async generator.

        If a client asks nothing for a while, its stream ends, and it opens another for its next question. So no stream
        is charged while its client has nothing to ask.
        """

        async def requests(context: Context) -> AsyncIterator[Any]:
            with suppress(DeadlinePassed, TimeoutError):
                raw = await self._read(context)
                while raw is not grpc.aio.EOF:
                    yield _parsed(handler.request_deserializer, raw)
                    async with asyncio.timeout(PROMPT_SECONDS):
                        raw = await context.read()

        async def behave(context: Context) -> None:
            async with aclosing(handler.stream_stream(requests(context), context)) as responses:
                async for response in responses:
                    await write(context, response)

        return behave

    async def _read(self, context: Context) -> Any:
        return await self._intake.message(context.read, most_bytes=self._message_bytes, peer=context.peer)

    @contextmanager
    def _lasting(self, method: str, client: str) -> Iterator[None]:
        """Count a lasting call for the life of the context. Raises Overloaded beyond the limits of its method."""
        everybody, own = (method, ""), (method, client)
        for key, most, whose in (
            (own, MAX_LASTING_A_CLIENT, " of this client"),
            (everybody, MAX_LASTING, ""),
        ):
            if self._num_lasting[key] >= most:
                raise Overloaded(
                    f"{most} such calls{whose} run already", retry_after_seconds=LASTING_RETRY_SECONDS
                )
        self._num_lasting.update((everybody, own))
        try:
            yield
        finally:
            self._num_lasting.subtract((everybody, own))
            if not self._num_lasting[own]:
                del self._num_lasting[own]


async def write(context: Context, message: Any) -> None:
    """Write one message of a stream.

    If the call has ended, its task is cancelled here: gRPC may report the failed write before the end of the call.
    """
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        await asyncio.sleep(END_SECONDS)
        raise


def _check_size(response: Message) -> None:
    """Raise RequestTooLarge for an answer that gRPC would not send."""
    if response.ByteSize() > MAX_RESPONSE_BYTES:
        raise RequestTooLarge(
            f"the answer has more than the {MAX_RESPONSE_BYTES // 2**20} MiB of one message: ask for a stream, a page "
            "of it, or fewer outputs or log-probabilities"
        )


def _parsed(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return parse(raw)
    except DecodeError:
        raise MalformedMessage("the request is not a valid message of this method") from None


async def _end(context: Context, error: RouterError) -> NoReturn:
    try:
        await context.abort(code_of(error), error.message, trailing_metadata(error))
    except grpc.aio.InternalError:
        # The call has ended before its status was sent. gRPC would log this as an error.
        raise asyncio.CancelledError from None
