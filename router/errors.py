"""Everything that can go wrong for a client, as one tree. Pure: how it travels is in services/status.py.

    RouterError                     code                  reason
    ├── InvalidRequest              INVALID_ARGUMENT      INVALID_REQUEST (+ field violations)
    │   └── ContextLengthExceeded   INVALID_ARGUMENT      CONTEXT_LENGTH_EXCEEDED
    ├── Unsupported                 UNIMPLEMENTED         UNSUPPORTED (+ field violations)
    ├── MalformedMessage            INVALID_ARGUMENT      MALFORMED_MESSAGE
    ├── Unauthenticated             UNAUTHENTICATED       UNAUTHENTICATED
    ├── Forbidden                   PERMISSION_DENIED     PERMISSION_DENIED
    ├── NotFound
    │   ├── UnknownModel            NOT_FOUND             MODEL_NOT_FOUND (+ field violation)
    │   ├── UnknownRequest          NOT_FOUND             REQUEST_NOT_FOUND (+ field violation)
    │   └── UnknownWorker           NOT_FOUND             WORKER_NOT_FOUND (+ field violation)
    ├── DuplicateRequest            ALREADY_EXISTS        REQUEST_ALREADY_RUNS (+ field violation)
    ├── RequestTooLarge             FAILED_PRECONDITION   REQUEST_TOO_LARGE
    ├── LastWorker                  FAILED_PRECONDITION   LAST_WORKER
    ├── Overloaded                  RESOURCE_EXHAUSTED    OVERLOADED (+ retry delay)
    │   └── RateLimited             RESOURCE_EXHAUSTED    RATE_LIMITED (+ retry delay)
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

Messages name fields, never their values: no text of a client may reach a log or another client. UnknownModel alone
repeats the model's name, to the client that sent it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One field that is wrong, by its path in the request message, and what is allowed."""

    field: str
    description: str


class RouterError(Exception):
    """An answer to a client that is not a result. Subclasses fix the reason, services/status.py their code."""

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

    @classmethod
    def of(cls, field: str, description: str) -> Self:
        """The common case: one field is wrong."""
        violation = FieldViolation(field=field, description=description)
        return cls(f"{field}: {description}", violations=(violation,))


class InvalidRequest(RouterError):
    """A field of the request is wrong; the violations say which, and what is allowed."""

    reason = "INVALID_REQUEST"


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for output within max_model_len."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class Unsupported(RouterError):
    """What the contract has a place for, and this version does not do yet."""

    reason = "UNSUPPORTED"


class MalformedMessage(RouterError):
    """The bytes of the call are not the method's message."""

    reason = "MALFORMED_MESSAGE"


class Unauthenticated(RouterError):
    """No token, one that is not known here, or one that has expired."""

    reason = "UNAUTHENTICATED"


class Forbidden(RouterError):
    """The token's role may not do this, or the tenant named is not its own."""

    reason = "PERMISSION_DENIED"


class NotFound(RouterError):
    reason = "NOT_FOUND"


class UnknownModel(NotFound):
    """The model named is not the one that is served."""

    reason = "MODEL_NOT_FOUND"


class UnknownRequest(NotFound):
    """No request of this id runs on the answering router, or not of the caller's tenant."""

    reason = "REQUEST_NOT_FOUND"


class UnknownWorker(NotFound):
    """No worker of this id is known."""

    reason = "WORKER_NOT_FOUND"


class DuplicateRequest(RouterError):
    """A request of this id runs already."""

    reason = "REQUEST_ALREADY_RUNS"


class RequestTooLarge(RouterError):
    """Prompt and max_tokens can never fit a worker's pool or context."""

    reason = "REQUEST_TOO_LARGE"


class LastWorker(RouterError):
    """No other worker takes requests, and the drain was not forced."""

    reason = "LAST_WORKER"


class Overloaded(RouterError):
    """The router holds as many requests or prompt tokens as it may, or the request has waited for too long."""

    reason = "OVERLOADED"


class RateLimited(Overloaded):
    """The token or its tenant has had all the requests or tokens of a minute that the auth file gives it."""

    reason = "RATE_LIMITED"


class SlowReader(RouterError):
    """The client took nothing of its stream for too long."""

    reason = "SLOW_READER"


class DeadlinePassed(RouterError):
    """The call's deadline passed."""

    reason = "DEADLINE_EXCEEDED"


class DeadlineUnreachable(DeadlinePassed):
    """By measured rates the first token would come long after the deadline; nothing was computed."""

    reason = "DEADLINE_UNREACHABLE"


class RequestAborted(RouterError):
    """An Abort ended the request, or a drain was taken back."""

    reason = "ABORTED"


class Unavailable(RouterError):
    reason = "UNAVAILABLE"


class NoWorkers(Unavailable):
    """No worker is ready, and none became so in time."""

    reason = "NO_WORKERS"


class WorkerLost(Unavailable):
    """The request lost more workers than it may; `tokens_emitted` says how far it was."""

    reason = "WORKER_LOST"


class WorkerUnreachable(Unavailable):
    """A worker that the call is about did not answer."""

    reason = "WORKER_UNREACHABLE"


class RouterDraining(Unavailable):
    """This router is about to end: another one takes the request."""

    reason = "ROUTER_DRAINING"


class InternalError(RouterError):
    """A fault of the router. Its log has the exception, the answer has nothing of it."""

    reason = "INTERNAL"


class EngineFailed(InternalError):
    """The engine failed on this request, more than once."""

    reason = "ENGINE_FAILED"


class PoisonRequest(InternalError):
    """Workers died under this request: it is tried on no other, and refused for a minute."""

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


def is_gone(error: Exception) -> bool:
    """Whether it is the client's connection that has failed, in a group maybe."""
    if isinstance(error, ExceptionGroup):
        return error.subgroup(ConnectionError) is not None
    return isinstance(error, ConnectionError)
