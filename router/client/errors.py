"""Exceptions of the clients, as one tree. Turns a gRPC status into an exception, and decides no retry.

```
    BlockyardError                 code, reason, field_violations, retry_delay_seconds, request_id
    ├── InvalidRequestError        INVALID_ARGUMENT, OUT_OF_RANGE, FAILED_PRECONDITION, ALREADY_EXISTS
    ├── AuthenticationError        UNAUTHENTICATED, PERMISSION_DENIED
    ├── NotFoundError              NOT_FOUND: a model, worker or request of that name
    ├── OverloadedError            RESOURCE_EXHAUSTED: come back after retry_delay_seconds
    ├── UnavailableError           UNAVAILABLE: no router, or no worker, answers
    ├── TimedOutError              DEADLINE_EXCEEDED
    ├── AbortedError               CANCELLED, ABORTED: ended by someone, not by a fault
    ├── ServerError                everything else: a fault of the cluster
    └── LostTokensError            a stream skipped, repeated or cut off tokens (found by the client)
```

A mistake that the client can detect is a ValueError or TypeError before anything is sent.
"""

from dataclasses import dataclass

import grpc
from blockyard.proto.naming import headers
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One field of the request, by a path such as `sampling.top_p`, and the reason why it is wrong."""

    field: str
    description: str


class BlockyardError(Exception):
    """Base of all errors of failed calls. `str(error)` is a sentence for people, `reason` a word for programs."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str = "",
        field_violations: tuple[FieldViolation, ...] = (),
        retry_delay_seconds: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        """Stable, in capitals, such as CONTEXT_LENGTH_EXCEEDED. Empty if the server gave none."""
        self.field_violations = field_violations
        self.retry_delay_seconds = retry_delay_seconds
        """Seconds to wait before another attempt, if the server gave them."""
        self.request_id = request_id
        """The request's id in the logs. Empty if the call brought no valid request."""


class InvalidRequestError(BlockyardError):
    """The request is wrong, or the cluster's present state excludes it, such as a request with the same id."""


class AuthenticationError(BlockyardError):
    """The token is missing or wrong, or does not allow this call."""


class NotFoundError(BlockyardError):
    """No model, worker or request has that name."""


class OverloadedError(BlockyardError):
    """A limit of the router or of this client is reached for now, or the client reads too slowly."""


class UnavailableError(BlockyardError):
    """No router answers, or the router has no worker that answers."""

    never_began = False
    """True if the connection brought no greeting of TLS or HTTP/2, as with a frozen router: no part of the call ran."""


class TimedOutError(BlockyardError):
    """The call's deadline passed."""


class AbortedError(BlockyardError):
    """An Abort, a cancellation or the undoing of a drain ended the call."""


class ServerError(BlockyardError):
    """A fault of the cluster, or an unexpected status."""


class LostTokensError(BlockyardError):
    """The stream skipped, repeated or cut off tokens."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=grpc.StatusCode.DATA_LOSS, reason="LOST_TOKENS")


_BY_CODE: dict[grpc.StatusCode, type[BlockyardError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOutError,
    grpc.StatusCode.CANCELLED: AbortedError,
    grpc.StatusCode.ABORTED: AbortedError,
}


def from_rpc(
    error: grpc.RpcError, address: str, *, has_begun: bool = False, is_tls: bool = False
) -> BlockyardError:
    """Return the exception for an RPC of grpc or grpc.aio that ended with an error status.

    `has_begun`: a part of the RPC's stream had been received.
    """
    # Every error that a call raises is also a Call; the base class declares nothing.
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    trailing = dict(error.trailing_metadata() or ())
    packed = trailing.get(headers.STATUS_DETAILS, b"")
    failure = from_status(error.code(), error.details() or "", packed if isinstance(packed, bytes) else b"")
    if isinstance(failure, UnavailableError) and not failure.reason:
        # No router sent this status. gRPC's text lists sockets and addresses, not the fate of the call.
        message = _connection_failure(address, error.details() or "", has_begun=has_begun, is_tls=is_tls)
        failure = UnavailableError(message, code=failure.code)
        failure.never_began = not has_begun and _is_silent(error.details() or "")
    if failure.retry_delay_seconds is None:
        failure.retry_delay_seconds = _pushback_seconds(trailing.get(headers.RETRY_PUSHBACK_MS))
    return failure


def from_status(code: grpc.StatusCode, message: str, packed_status: bytes) -> BlockyardError:
    """Return the exception for a status code, its message, and a packed google.rpc.Status (empty if there is none)."""
    reason, request_id, violations, delay_seconds = "", "", [], None
    for detail in _details(packed_status):
        match detail:
            case error_details_pb2.ErrorInfo():
                reason, request_id = detail.reason, detail.metadata.get("request_id", "")
            case error_details_pb2.BadRequest():
                violations += [
                    FieldViolation(field=violation.field, description=violation.description)
                    for violation in detail.field_violations
                ]
            case error_details_pb2.RetryInfo():
                delay_seconds = detail.retry_delay.ToTimedelta().total_seconds()
    return _BY_CODE.get(code, ServerError)(
        message or code.name,
        code=code,
        reason=reason,
        field_violations=tuple(violations),
        retry_delay_seconds=delay_seconds,
        request_id=request_id,
    )


def _connection_failure(address: str, details: str, *, has_begun: bool, is_tls: bool) -> str:
    """Return a sentence about a failed connection. `details` is gRPC's own text, which quotes its TLS library."""
    if has_begun:
        return f"lost the connection to the router at {address} in mid-stream: the output is incomplete"
    if "certificate has expired" in details:
        return f"the TLS certificate of the router at {address} has expired"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"the TLS certificate of the router at {address} is of no CA that this client trusts"
    if "not in peer certificate" in details or "Hostname Verification" in details:
        return f"the TLS certificate of the router at {address} is for another host"
    if "WRONG_VERSION_NUMBER" in details:
        return f"what answers at {address} does not speak TLS"
    if "Socket closed" in details or "Connection reset" in details:
        wants = "a client certificate, or another one" if is_tls else "TLS"
        return f"no router answers at {address}: the connection was closed, as by one that wants {wants}"
    if "Failed parsing HTTP/2" in details:
        return (
            f"what answers at {address} speaks no gRPC: it is another service's port, or a gateway's for HTTP"
        )
    if "Connection refused" in details:
        return f"no router answers at {address}: connection refused"
    if "Domain name not found" in details:
        return f"no router answers at {address}: no host of this name is known"
    return f"no router answers at {address}"


def _is_silent(details: str) -> bool:
    """Return True if gRPC's text says that a connection got no greeting of TLS or HTTP/2 within `connect_seconds`."""
    return "before receiving SETTINGS frame" in details or "Endpoint closing" in details


def _pushback_seconds(value: str | bytes | None) -> float | None:
    """Return the retry delay in seconds, or None. A negative value, which forbids a retry, gives None."""
    text = value if isinstance(value, str) else ""
    return int(text) / 1000 if text.isascii() and text.isdigit() else None


def _details(packed_status: bytes) -> list[Message]:
    """Return the details of the three known kinds, without any that a proxy added."""
    found: list[Message] = []
    try:
        for packed in status_pb2.Status.FromString(packed_status).details:
            for kind in (
                error_details_pb2.ErrorInfo,
                error_details_pb2.BadRequest,
                error_details_pb2.RetryInfo,
            ):
                detail = kind()
                if packed.Unpack(detail):
                    found.append(detail)
    except DecodeError:
        return []
    return found
