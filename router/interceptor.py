"""What stands between the wire and every handler: parsing, and the one place where exceptions become
statuses.

gRPC's own deserialiser answers a malformed message with UNKNOWN and sends the text of an uncaught exception
to the client. So every unary-request method of every service on the server is wrapped: its bytes are parsed
here, and whatever the handler raises goes through status.py. Cancellation passes untouched.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from blockyard.router.errors import InternalError, MalformedMessage, as_router_error
from blockyard.router.status import code_of, trailing_metadata
from google.protobuf.message import DecodeError

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Wraps methods with one request message; handlers must be coroutines (streams use `context.write`)."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        wrapped = _guarded(inner, handler.request_deserializer, handler_call_details.method)
        return make(wrapped, request_deserializer=None, response_serializer=handler.response_serializer)


def _guarded(inner: Behaviour, parse: Callable[[bytes], Any], method: str) -> Behaviour:
    async def behave(raw: bytes, context: Context) -> Any:
        try:
            return await inner(_parsed(parse, raw), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return behave


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
