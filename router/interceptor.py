"""What stands between the wire and every handler: who calls, parsing, and the one place where exceptions become
statuses.

gRPC's own deserialiser answers a malformed message with UNKNOWN and sends the text of an uncaught exception
to the client. So every method of every service on the server is wrapped: its bytes are parsed here, and whatever
the handler raises goes through status.py. Cancellation passes untouched.

Where clients authenticate, AuthInterceptor stands before that: a call that is refused is never read. It sees every
method, streams of requests and unknown ones too. The rules are in auth.py.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from traceback import clear_frames
from typing import Any, NoReturn

import grpc
from blockyard.router.auth import METHOD_ROLES, PRINCIPAL, TokenTable, authenticate, check_role
from blockyard.router.errors import (
    Forbidden,
    InternalError,
    MalformedMessage,
    RouterError,
    Unauthenticated,
    as_router_error,
)
from blockyard.router.status import code_of, trailing_metadata
from blockyard.router.turn_share import TurnShare
from google.protobuf.message import DecodeError

logger = logging.getLogger(__name__)
audit = logging.getLogger("blockyard.audit")

ENDS_A_TURN = 8
"""Cancelled calls whose frames are freed in one turn of the event loop."""
UNKNOWN_LOG_SECONDS = 10.0
"""Calls without a known token are counted, and told so often at most: whoever makes them must not fill the log."""

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Admits calls by their token; the caller is PRINCIPAL in the handler."""

    def __init__(self, tokens: Callable[[], TokenTable]) -> None:
        """`tokens`: those of now."""
        self._tokens = tokens
        self._num_unknown = 0
        self._told_at = -UNKNOWN_LOG_SECONDS

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = handler_call_details.method
        try:
            principal = authenticate(method, handler_call_details.invocation_metadata or (), self._tokens())
        except Unauthenticated as error:
            self._count_unknown()
            return _refusal(error)
        if principal is not None:
            try:
                check_role(method, principal)
            except Forbidden as error:
                # A method's name is the client's text, unless it is one of ours.
                told = method if method in METHOD_ROLES else "an unknown method"
                audit.warning("denied: %s as %s called %s", principal.name, principal.role, told)
                return _refusal(error)
        PRINCIPAL.set(principal)
        return await continuation(handler_call_details)

    def _count_unknown(self) -> None:
        self._num_unknown += 1
        now = time.monotonic()
        if now - self._told_at >= UNKNOWN_LOG_SECONDS:
            audit.warning("%d calls came without a token that is known", self._num_unknown)
            self._num_unknown, self._told_at = 0, now


def _refusal(error: RouterError) -> Any:
    """Stands in for a handler of any kind: on the wire an end without a message is the same for all."""

    async def refuse(_: Any, context: Context) -> None:
        await context.abort(code_of(error), error.message, trailing_metadata(error))

    return grpc.stream_stream_rpc_method_handler(refuse)


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Wraps methods with one request message, whose handlers must be coroutines (streams use `context.write`), and
    those with a stream of them."""

    def __init__(self) -> None:
        self._ends = TurnShare(ENDS_A_TURN)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        if handler.request_streaming:
            return _guarded_stream(handler, handler_call_details.method)
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        wrapped = _guarded(inner, handler.request_deserializer, handler_call_details.method, self._ends)
        return make(wrapped, request_deserializer=None, response_serializer=handler.response_serializer)


def _guarded(inner: Behaviour, parse: Callable[[bytes], Any], method: str, ends: TurnShare) -> Behaviour:
    async def behave(raw: bytes, context: Context) -> Any:
        try:
            return await inner(_parsed(parse, raw), context)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError as error:
            # A task group's frame and the error that ended it hold one another. Freed here, a few calls a turn, it
            # costs little; left to the garbage collector, many that end in one moment stop the loop.
            await ends.take()
            clear_frames(error.__traceback__)
            raise
        except Exception as error:
            await _abort(context, error, method)

    return behave


def _guarded_stream(handler: Any, method: str) -> Any:
    """Of reflection, the one method whose requests are a stream; its handler is an async generator."""
    assert handler.response_streaming

    async def behave(raws: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        requests = (_parsed(handler.request_deserializer, raw) async for raw in raws)
        try:
            async for response in handler.stream_stream(requests, context):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return grpc.stream_stream_rpc_method_handler(
        behave, request_deserializer=None, response_serializer=handler.response_serializer
    )


def _parsed(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return parse(raw)
    except DecodeError:
        raise MalformedMessage("the request is not a valid message of this method") from None


async def _abort(context: Context, error: Exception, method: str) -> NoReturn:
    answer = as_router_error(error)
    if type(answer) is InternalError:
        # The exception's text may quote the request: log where it was raised, not what it says.
        logger.error("%s failed: %s at %s", method, type(error).__name__, _origin(error))
    await context.abort(code_of(answer), answer.message, trailing_metadata(answer))


def _origin(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "unknown place"
    code = trace.tb_frame.f_code
    return (
        f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name} ({type(error).__name__})"
    )
