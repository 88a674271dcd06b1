"""Everything that can go wrong for a client, as one tree, and its one mapping to gRPC.

    RouterError                     code                  reason
    ├── InvalidRequest              INVALID_ARGUMENT      INVALID_REQUEST (+ field violations)
    │   └── ContextLengthExceeded   INVALID_ARGUMENT      CONTEXT_LENGTH_EXCEEDED
    ├── MalformedMessage            INVALID_ARGUMENT      MALFORMED_MESSAGE
    ├── NotFound
    │   ├── UnknownModel            NOT_FOUND             MODEL_NOT_FOUND
    │   ├── UnknownRequest          NOT_FOUND             REQUEST_NOT_FOUND
    │   └── UnknownWorker           NOT_FOUND             WORKER_NOT_FOUND
    ├── DuplicateRequest            ALREADY_EXISTS        REQUEST_ALREADY_RUNS
    ├── RequestTooLarge             FAILED_PRECONDITION   REQUEST_TOO_LARGE
    ├── Overloaded                  RESOURCE_EXHAUSTED    OVERLOADED (+ retry delay)
    ├── SlowReader                  RESOURCE_EXHAUSTED    SLOW_READER
    ├── DeadlinePassed              DEADLINE_EXCEEDED     DEADLINE_EXCEEDED
    ├── RequestAborted              CANCELLED             ABORTED
    ├── Unavailable
    │   ├── NoWorkers               UNAVAILABLE           NO_WORKERS (+ retry delay)
    │   ├── WorkerLost              UNAVAILABLE           WORKER_LOST (+ tokens_emitted)
    │   ├── WorkerUnreachable       UNAVAILABLE           WORKER_UNREACHABLE
    │   └── RouterDraining          UNAVAILABLE           ROUTER_DRAINING (+ retry delay)
    └── InternalError               INTERNAL              INTERNAL
        └── EngineFailed            INTERNAL              ENGINE_FAILED

Messages name fields, never their values: no text of a client may reach a log or another client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

ERROR_DOMAIN = "blockyard"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One field that is wrong, by its path in the request message, and what is allowed."""

    field: str
    description: str


class RouterError(Exception):
    """An answer to a client that is not a result. Subclasses fix code and reason."""

    code: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]

    def __init__(
        self,
        message: str,
        *,
        violations: Sequence[FieldViolation] = (),
        retry_after_seconds: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_seconds = retry_after_seconds
        self.metadata = dict(metadata or {})


class InvalidRequest(RouterError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidRequest":
        """The common case: one field is wrong."""
        violation = FieldViolation(field=field, description=description)
        return cls(f"{field}: {description}", violations=(violation,))


class ContextLengthExceeded(InvalidRequest):
    reason = "CONTEXT_LENGTH_EXCEEDED"


class MalformedMessage(RouterError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "MALFORMED_MESSAGE"


class NotFound(RouterError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class UnknownModel(NotFound):
    reason = "MODEL_NOT_FOUND"


class UnknownRequest(NotFound):
    reason = "REQUEST_NOT_FOUND"


class UnknownWorker(NotFound):
    reason = "WORKER_NOT_FOUND"


class DuplicateRequest(RouterError):
    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "REQUEST_ALREADY_RUNS"


class RequestTooLarge(RouterError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "REQUEST_TOO_LARGE"


class Overloaded(RouterError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class SlowReader(RouterError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SLOW_READER"


class DeadlinePassed(RouterError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class RequestAborted(RouterError):
    code = grpc.StatusCode.CANCELLED
    reason = "ABORTED"


class Unavailable(RouterError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class NoWorkers(Unavailable):
    reason = "NO_WORKERS"


class WorkerLost(Unavailable):
    reason = "WORKER_LOST"


class WorkerUnreachable(Unavailable):
    reason = "WORKER_UNREACHABLE"


class RouterDraining(Unavailable):
    reason = "ROUTER_DRAINING"


class InternalError(RouterError):
    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"


class EngineFailed(InternalError):
    reason = "ENGINE_FAILED"


def as_router_error(error: BaseException) -> RouterError:
    """The answer for any exception: itself, the first of ours in a group, or INTERNAL without a word of it."""
    if isinstance(error, RouterError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [as_router_error(inner) for inner in error.exceptions]
        named = [inner for inner in found if type(inner) is not InternalError]
        return (named or found)[0]
    return InternalError("internal error")


def rpc_status(error: RouterError) -> status_pb2.Status:
    """The error as google.rpc.Status with its details."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    details: list[message.Message] = [info]
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad_request.field_violations.add(field=violation.field, description=violation.description)
        details.append(bad_request)
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    status.details.extend(_packed(detail) for detail in details)
    return status


def trailing_metadata(error: RouterError) -> tuple[tuple[str, str | bytes], ...]:
    """What goes beside code and message: the details, and the delay that gRPC's own retries obey."""
    metadata: list[tuple[str, str | bytes]] = [
        ("grpc-status-details-bin", rpc_status(error).SerializeToString())
    ]
    if error.retry_after_seconds is not None:
        metadata.append(("grpc-retry-pushback-ms", str(round(error.retry_after_seconds * 1000))))
    return tuple(metadata)


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
