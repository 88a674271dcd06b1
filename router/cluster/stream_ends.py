"""How a stream to a worker ends: what its tasks raise, what operators are told, and that nothing of it is kept."""

import traceback

import grpc


class StreamOver(Exception):
    """Ends the tasks of a stream; its text is the reason that operators see."""


class NoDeath(StreamOver):
    """The worker has not ended, as far as we know, or has said goodbye."""


def forget_frames(error: BaseException) -> None:
    """A group and the frames that it came through hold each other, and those the call, whose connection stays open
    for as long: until the garbage collector comes by."""
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
    """Only gRPC's own text of a failed connection is looked at, and nothing that the other side has said."""
    if error.code() is grpc.StatusCode.UNAVAILABLE and "handshake" in (error.details() or "").lower():
        return "the TLS handshake failed: another cluster name, another cluster secret or other certificates"
    return f"stream ended with {error.code().name}"
