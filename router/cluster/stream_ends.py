"""Ends of a stream to a worker: the exceptions of its tasks, and the reason that operators see."""

import traceback

import grpc


class StreamOver(Exception):
    """Raised in one task of a stream to end all of them. Its text is the reason that operators see."""


class NoDeath(StreamOver):
    """The stream is over, but the worker is not known to have died: it is silent, or ended the stream with status
    OK."""


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
