"""What stands between the wire and every handler: who calls, parsing, and the one place where exceptions become
statuses.

gRPC's own deserialiser answers a malformed message with UNKNOWN and sends the text of an uncaught exception
to the client. So every method of every service on the server is wrapped: its bytes are parsed here, and whatever
the handler raises goes through status.py. Cancellation passes untouched.

Where clients authenticate, AuthInterceptor stands before that: a call that is refused is never read. It sees every
method, streams of requests and unknown ones too. The rules are in auth.py, what other protocols share in call_gate.py.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from blockyard.router.call_gate import CallGate, answer_to
from blockyard.router.errors import MalformedMessage, RouterError
from blockyard.router.status import code_of, trailing_metadata
from google.protobuf.message import DecodeError

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Admits calls by their token; the caller is PRINCIPAL in the handler."""

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
    """Stands in for a handler of any kind: on the wire an end without a message is the same for all."""

    async def refuse(_: Any, context: Context) -> None:
        await context.abort(code_of(error), error.message, trailing_metadata(error))

    return grpc.stream_stream_rpc_method_handler(refuse)


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Wraps methods with one request message, whose handlers must be coroutines (streams use `context.write`), and
    those with a stream of them."""

    def __init__(self, gate: CallGate) -> None:
        self._gate = gate

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
        wrapped = _guarded(inner, handler.request_deserializer, handler_call_details.method, self._gate)
        return make(wrapped, request_deserializer=None, response_serializer=handler.response_serializer)


def _guarded(inner: Behaviour, parse: Callable[[bytes], Any], method: str, gate: CallGate) -> Behaviour:
    async def behave(raw: bytes, context: Context) -> Any:
        try:
            return await inner(_parsed(parse, raw), context)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError as error:
            await gate.free(error)
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
    answer = answer_to(error, method)
    await context.abort(code_of(answer), answer.message, trailing_metadata(answer))
