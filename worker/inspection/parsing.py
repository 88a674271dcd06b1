"""Parsing of calls to a worker: their bytes must be a message. TLS decides which peers may connect at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

M = TypeVar("M", bound=Message)


async def parse(kind: type[M], data: bytes, context: Context) -> M:
    """Return the parsed message. Ends the call as INVALID_ARGUMENT where the bytes are no such message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, f"the message is not a valid {kind.DESCRIPTOR.name}"
        )
        raise
