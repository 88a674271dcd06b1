"""What every call to a worker must bring: bytes that are a message. Who may connect at all is decided by TLS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

M = TypeVar("M", bound=Message)


async def parse(kind: type[M], data: bytes, context: Context) -> M:
    """Ends the call as INVALID_ARGUMENT where the bytes are something else."""
    try:
        return kind.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"this is no {kind.DESCRIPTOR.name}")
        raise
