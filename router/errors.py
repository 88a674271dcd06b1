"""Everything that can go wrong for a client, as one tree. Pure: how it travels is in status.py.

    RouterError                     code                  reason
    ├── InvalidRequest              INVALID_ARGUMENT      INVALID_REQUEST (+ field violations)
    │   └── ContextLengthExceeded   INVALID_ARGUMENT      CONTEXT_LENGTH_EXCEEDED
    ├── Unsupported                 UNIMPLEMENTED         UNSUPPORTED (+ field violations)
    ├── MalformedMessage            INVALID_ARGUMENT      MALFORMED_MESSAGE
    ├── Unauthenticated             UNAUTHENTICATED       UNAUTHENTICATED
    ├── Forbidden                   PERMISSION_DENIED     PERMISSION_DENIED
    ├── NotFound
    │   ├── UnknownModel            NOT_FOUND             MODEL_NOT_FOUND
    │   ├── UnknownRequest          NOT_FOUND             REQUEST_NOT_FOUND
    │   └── UnknownWorker           NOT_FOUND             WORKER_NOT_FOUND
    ├── DuplicateRequest            ALREADY_EXISTS        REQUEST_ALREADY_RUNS
    ├── RequestTooLarge             FAILED_PRECONDITION   REQUEST_TOO_LARGE
    ├── Overloaded                  RESOURCE_EXHAUSTED    OVERLOADED (+ retry delay)
    ├── SlowReader                  RESOURCE_EXHAUSTED    SLOW_READER
    ├── DeadlinePassed              DEADLINE_EXCEEDED     DEADLINE_EXCEEDED
    │   └── DeadlineUnreachable     DEADLINE_EXCEEDED     DEADLINE_UNREACHABLE
    ├── RequestAborted              CANCELLED             ABORTED
    ├── Unavailable
    │   ├── NoWorkers               UNAVAILABLE           NO_WORKERS (+ retry delay)
    │   ├── WorkerLost              UNAVAILABLE           WORKER_LOST (+ tokens_emitted)
    │   ├── WorkerUnreachable       UNAVAILABLE           WORKER_UNREACHABLE
    │   └── RouterDraining          UNAVAILABLE           ROUTER_DRAINING (+ retry delay)
    └── InternalError               INTERNAL              INTERNAL
        ├── EngineFailed            INTERNAL              ENGINE_FAILED
        └── PoisonRequest           INTERNAL              POISON_REQUEST (+ tokens_emitted)

Messages name fields, never their values: no text of a client may reach a log or another client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One field that is wrong, by its path in the request message, and what is allowed."""

    field: str
    description: str


class RouterError(Exception):
    """An answer to a client that is not a result. Subclasses fix the reason, status.py their code."""

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
    reason = "INVALID_REQUEST"

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidRequest":
        """The common case: one field is wrong."""
        violation = FieldViolation(field=field, description=description)
        return cls(f"{field}: {description}", violations=(violation,))


class ContextLengthExceeded(InvalidRequest):
    reason = "CONTEXT_LENGTH_EXCEEDED"


class Unsupported(RouterError):
    """What the contract has a place for, and this version does not do yet."""

    reason = "UNSUPPORTED"


class MalformedMessage(RouterError):
    reason = "MALFORMED_MESSAGE"


class Unauthenticated(RouterError):
    reason = "UNAUTHENTICATED"


class Forbidden(RouterError):
    reason = "PERMISSION_DENIED"


class NotFound(RouterError):
    reason = "NOT_FOUND"


class UnknownModel(NotFound):
    reason = "MODEL_NOT_FOUND"


class UnknownRequest(NotFound):
    reason = "REQUEST_NOT_FOUND"


class UnknownWorker(NotFound):
    reason = "WORKER_NOT_FOUND"


class DuplicateRequest(RouterError):
    reason = "REQUEST_ALREADY_RUNS"


class RequestTooLarge(RouterError):
    reason = "REQUEST_TOO_LARGE"


class Overloaded(RouterError):
    reason = "OVERLOADED"


class SlowReader(RouterError):
    reason = "SLOW_READER"


class DeadlinePassed(RouterError):
    reason = "DEADLINE_EXCEEDED"


class DeadlineUnreachable(DeadlinePassed):
    reason = "DEADLINE_UNREACHABLE"


class RequestAborted(RouterError):
    reason = "ABORTED"


class Unavailable(RouterError):
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
    reason = "INTERNAL"


class EngineFailed(InternalError):
    reason = "ENGINE_FAILED"


class PoisonRequest(InternalError):
    reason = "POISON_REQUEST"


def as_router_error(error: BaseException) -> RouterError:
    """The answer for any exception: itself, the first of ours in a group, or INTERNAL without a word of it."""
    if isinstance(error, RouterError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [as_router_error(inner) for inner in error.exceptions]
        named = [inner for inner in found if type(inner) is not InternalError]
        return (named or found)[0]
    return InternalError("internal error")
