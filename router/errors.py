"""Error tree: everything that can go wrong for a client. Pure: services/grpc_status.py maps it to gRPC.

```
    RouterError                     code                  reason
    ├── InvalidRequest              INVALID_ARGUMENT      INVALID_REQUEST (+ field violations)
    │   ├── ContextLengthExceeded   INVALID_ARGUMENT      CONTEXT_LENGTH_EXCEEDED
    │   └── NameTaken               ALREADY_EXISTS        INVALID_REQUEST (+ field violation)
    ├── Unsupported                 UNIMPLEMENTED         UNSUPPORTED (+ field violations)
    ├── MalformedMessage            INVALID_ARGUMENT      MALFORMED_MESSAGE
    ├── Unauthenticated             UNAUTHENTICATED       UNAUTHENTICATED
    ├── Forbidden                   PERMISSION_DENIED     PERMISSION_DENIED
    ├── NotFound
    │   ├── UnknownModel            NOT_FOUND             MODEL_NOT_FOUND (+ field violation)
    │   ├── UnknownRequest          NOT_FOUND             REQUEST_NOT_FOUND (+ field violation)
    │   ├── UnknownResponse         NOT_FOUND             RESPONSE_NOT_FOUND (+ field violation)
    │   └── UnknownWorker           NOT_FOUND             WORKER_NOT_FOUND (+ field violation)
    ├── DuplicateRequest            ALREADY_EXISTS        REQUEST_ALREADY_RUNS (+ field violation)
    ├── RequestTooLarge             FAILED_PRECONDITION   REQUEST_TOO_LARGE
    ├── LastWorker                  FAILED_PRECONDITION   LAST_WORKER
    ├── PullImpossible              FAILED_PRECONDITION   PULL_IMPOSSIBLE
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
    │   ├── PullFailed              UNAVAILABLE           PULL_FAILED
    │   ├── StoreUnavailable        UNAVAILABLE           STORE_UNAVAILABLE
    │   ├── AuthUnavailable         UNAVAILABLE           AUTH_UNAVAILABLE (+ retry delay)
    │   └── RouterDraining          UNAVAILABLE           ROUTER_DRAINING (+ retry delay)
    └── InternalError               INTERNAL              INTERNAL
        ├── EngineFailed            INTERNAL              ENGINE_FAILED
        └── PoisonRequest           INTERNAL              POISON_REQUEST (+ tokens_emitted)
```

Messages name fields, never their values, so that no text of a client reaches a log or another client. There is one
exception: UnknownModel repeats the model's name to the client that sent it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """Path of a wrong field of the request message, and what is allowed there."""

    field: str
    description: str


MAX_TOLD = 5
"""The most violations in the text of an error. Its details have all of them."""


class RouterError(Exception):
    """An error that a client receives. Subclasses set the reason, and services/grpc_status.py their code."""

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
        """Return an error about one wrong field."""
        violation = FieldViolation(field=field, description=description)
        return cls(f"{field}: {description}", violations=(violation,))

    @classmethod
    def of_all(cls, violations: Sequence[FieldViolation]) -> Self:
        """Return an error about several wrong fields. Its text has the first MAX_TOLD of them."""
        text = "; ".join(f"{violation.field}: {violation.description}" for violation in violations[:MAX_TOLD])
        left = len(violations) - MAX_TOLD
        return cls(text + (f"; and {left} more" if left > 0 else ""), violations=violations)


class InvalidRequest(RouterError):
    """A field of the request is wrong. The violations name the field and what is allowed."""

    reason = "INVALID_REQUEST"


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for output within max_model_len."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class NameTaken(InvalidRequest):
    """A model, or an adapter of another model, has the name that an adapter was to get."""


class Unsupported(RouterError):
    """A feature that the contract has, but this version does not support."""

    reason = "UNSUPPORTED"


class MalformedMessage(RouterError):
    """The bytes of the call are not the method's message."""

    reason = "MALFORMED_MESSAGE"


class Unauthenticated(RouterError):
    """There is no token, or it is unknown here, or it has expired."""

    reason = "UNAUTHENTICATED"


class Forbidden(RouterError):
    """The token's role may not do this, or the named tenant is not the token's."""

    reason = "PERMISSION_DENIED"


class NotFound(RouterError):
    reason = "NOT_FOUND"


class UnknownModel(NotFound):
    """The named model is not the one that is served."""

    reason = "MODEL_NOT_FOUND"


class UnknownRequest(NotFound):
    """No request of this id runs on this router, or it belongs to another tenant."""

    reason = "REQUEST_NOT_FOUND"


class UnknownResponse(NotFound):
    """No stored response of this id is known, it has expired, or it belongs to another tenant."""

    reason = "RESPONSE_NOT_FOUND"


class UnknownWorker(NotFound):
    """No worker of this id is known."""

    reason = "WORKER_NOT_FOUND"


class DuplicateRequest(RouterError):
    """A request of this id is running already."""

    reason = "REQUEST_ALREADY_RUNS"


class RequestTooLarge(RouterError):
    """The prompt and max_tokens, for all outputs or beams, can never fit a worker: its context, KV pool or
    `max_num_seqs`. Or the answer of a call does not fit one gRPC message."""

    reason = "REQUEST_TOO_LARGE"


class LastWorker(RouterError):
    """No other worker takes requests, and the drain was not forced."""

    reason = "LAST_WORKER"


class PullImpossible(RouterError):
    """One of the two workers cannot lend or fetch, their blocks differ, or nothing of the prompt is cached
    elsewhere."""

    reason = "PULL_IMPOSSIBLE"


class Overloaded(RouterError):
    """A limit of the router or a tenant's share of it is reached, or the request has waited too long."""

    reason = "OVERLOADED"


class RateLimited(Overloaded):
    """The API token or its tenant has too little left of the requests or tokens per minute that the auth file
    allows."""

    reason = "RATE_LIMITED"


class SlowReader(RouterError):
    """The client has not read its stream for too long."""

    reason = "SLOW_READER"


class DeadlinePassed(RouterError):
    """The call's deadline passed."""

    reason = "DEADLINE_EXCEEDED"


class DeadlineUnreachable(DeadlinePassed):
    """The first token on any worker is expected long after the deadline, according to measured rates."""

    reason = "DEADLINE_UNREACHABLE"


class RequestAborted(RouterError):
    """An Abort ended the request, or the drain that the call waits for was undone."""

    reason = "ABORTED"


class Unavailable(RouterError):
    reason = "UNAVAILABLE"


class NoWorkers(Unavailable):
    """No worker is ready, and none became ready in time. Or none that is ready can load the request's adapter."""

    reason = "NO_WORKERS"


class WorkerLost(Unavailable):
    """The request lost more workers than `max_migrations`. `tokens_emitted` counts the tokens that it had got."""

    reason = "WORKER_LOST"


class WorkerUnreachable(Unavailable):
    """A worker that the call must ask did not answer."""

    reason = "WORKER_UNREACHABLE"


class PullFailed(Unavailable):
    """The pull that an admin ordered has not brought all blocks. Those that arrived are kept."""

    reason = "PULL_FAILED"


class StoreUnavailable(Unavailable):
    """Redis, which keeps what the call asks for, does not answer."""

    reason = "STORE_UNAVAILABLE"


class AuthUnavailable(Unavailable):
    """The auth file cannot be used now. The token is one of those that it last had."""

    reason = "AUTH_UNAVAILABLE"


class RouterDraining(Unavailable):
    """This router shuts down. Another router can take the request."""

    reason = "ROUTER_DRAINING"


class InternalError(RouterError):
    """The router has failed. Its log has the exception, and the response quotes nothing of it."""

    reason = "INTERNAL"


class EngineFailed(InternalError):
    """The engine failed on this request, and the router does not try it again."""

    reason = "ENGINE_FAILED"


class PoisonRequest(InternalError):
    """Two workers died under this request, with `tokens_emitted`, or under its prompt less than a minute ago. No
    further worker gets it."""

    reason = "POISON_REQUEST"


def as_router_error(error: BaseException) -> RouterError:
    """Return the error for the client: `error` itself if it is a RouterError, else the first one in a group, else
    INTERNAL without details."""
    if isinstance(error, RouterError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [as_router_error(inner) for inner in error.exceptions]
        named = [inner for inner in found if type(inner) is not InternalError]
        return (named or found)[0]
    return InternalError("internal error")


def is_gone(error: Exception) -> bool:
    """Return True if the error, or one in a group, says that the client's connection has failed."""
    if isinstance(error, ExceptionGroup):
        return error.subgroup(ConnectionError) is not None
    return isinstance(error, ConnectionError)
