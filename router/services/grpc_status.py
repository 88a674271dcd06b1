"""Mapping of the error tree (errors.py) to gRPC: code, details and trailing metadata."""

import grpc
from blockyard.proto.naming import headers
from blockyard.router import errors
from blockyard.router.errors import RouterError
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

ERROR_DOMAIN = "blockyard"
CODES: dict[type[RouterError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NameTaken: grpc.StatusCode.ALREADY_EXISTS,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    errors.RequestTooLarge: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LastWorker: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PullImpossible: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.SlowReader: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RequestAborted: grpc.StatusCode.CANCELLED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
"""Codes by error. A subclass that is not listed has its parent's code."""


def code_of(error: RouterError) -> grpc.StatusCode:
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def rpc_status(error: RouterError) -> status_pb2.Status:
    """Return the error as google.rpc.Status with its details."""
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
    status = status_pb2.Status(code=code_of(error).value[0], message=error.message)
    status.details.extend(_packed(detail) for detail in details)
    return status


def trailing_metadata(error: RouterError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the error's details as metadata, with the retry delay in the form that gRPC's own retries obey."""
    metadata: list[tuple[str, str | bytes]] = [
        (headers.STATUS_DETAILS, rpc_status(error).SerializeToString())
    ]
    if error.retry_after_seconds is not None:
        metadata.append((headers.RETRY_PUSHBACK_MS, str(round(error.retry_after_seconds * 1000))))
    return tuple(metadata)


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
