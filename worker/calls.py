"""What every call to a worker must bring: the cluster's secret, and bytes that are a message."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SECRET_HEADER = "x-blockyard-secret"
M = TypeVar("M", bound=Message)


async def check_secret(context: Context, secret: str) -> None:
    """Ends the call as UNAUTHENTICATED where the secret is missing or wrong."""
    metadata = context.invocation_metadata() or ()
    shown = next((value for key, value in metadata if key == SECRET_HEADER), "")
    if not hmac.compare_digest(str(shown).encode(), secret.encode()):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster secret is missing or wrong")


async def parse(kind: type[M], data: bytes, context: Context) -> M:
    """Ends the call as INVALID_ARGUMENT where the bytes are something else."""
    try:
        return kind.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"this is no {kind.DESCRIPTOR.name}")
        raise
