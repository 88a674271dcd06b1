"""Mapping of errors to HTTP: status, headers and OpenAI's error body.

gRPC's codes decide the status (services/grpc_status.py). Owns also the errors that only HTTP has. Messages name fields
as the JSON body does, and quote no value except a model's name.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import grpc
from blockyard.proto.naming.headers import REQUEST_ID, RETRY_AFTER, RETRY_AFTER_MS
from blockyard.router.errors import RouterError
from blockyard.router.services.grpc_status import code_of

Code = grpc.StatusCode
STATUSES: dict[grpc.StatusCode, tuple[int, str]] = {
    Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    Code.UNIMPLEMENTED: (400, "invalid_request_error"),
    Code.FAILED_PRECONDITION: (400, "invalid_request_error"),
    Code.UNAUTHENTICATED: (401, "authentication_error"),
    Code.PERMISSION_DENIED: (403, "permission_error"),
    Code.NOT_FOUND: (404, "invalid_request_error"),
    Code.ALREADY_EXISTS: (409, "conflict_error"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    Code.CANCELLED: (499, "cancelled_error"),
    Code.INTERNAL: (500, "server_error"),
    Code.UNAVAILABLE: (503, "server_error"),
    Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
"""HTTP status and OpenAI's error type, by gRPC code."""
WORTH_RETRYING = frozenset({Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE})
"""Codes for which x-should-retry is true. Without it OpenAI's client would retry every 409 and 5xx, also a poison."""
JSON_NAMES: dict[str, str] = {
    "sampling.include_stop_in_output": "include_stop_str_in_output",
    "sampling.structured_output": "response_format",
    "prompt_token_ids": "prompt",
    "chat.template_kwargs": "chat_template_kwargs",
    "request_id": REQUEST_ID,
}
"""JSON names of the fields of GenerateRequest whose name is not just that without `sampling.` or `chat.`."""
NO_NAMES: Mapping[str, str] = MappingProxyType({})


class HttpRefusal(RouterError):
    """An error that only HTTP has."""

    status: ClassVar[int]


class NoSuchRoute(HttpRefusal):
    reason, status = "ROUTE_NOT_FOUND", 404


class MethodNotAllowed(HttpRefusal):
    reason, status = "METHOD_NOT_ALLOWED", 405


class BodyTooSlow(HttpRefusal):
    reason, status = "BODY_TOO_SLOW", 408


class HeadTooSlow(HttpRefusal):
    reason, status = "HEAD_TOO_SLOW", 408


class HeadTooLarge(HttpRefusal):
    reason, status = "HEAD_TOO_LARGE", 431


class BodyTooLarge(HttpRefusal):
    reason, status = "BODY_TOO_LARGE", 413


class UnsupportedMediaType(HttpRefusal):
    reason, status = "UNSUPPORTED_MEDIA_TYPE", 415


class NoSuchItem(HttpRefusal):
    reason, status = "ITEM_NOT_FOUND", 404


class BadEncryptedContent(HttpRefusal):
    reason, status = "INVALID_ENCRYPTED_CONTENT", 400


class NoSuchFile(HttpRefusal):
    reason, status = "FILE_NOT_FOUND", 404


class NoSuchBatch(HttpRefusal):
    reason, status = "BATCH_NOT_FOUND", 404


class Conflict(HttpRefusal):
    reason, status = "CONFLICT", 409


class BatchLimit(HttpRefusal):
    reason, status = "BATCH_LIMIT", 429


class BatchesOff(HttpRefusal):
    reason, status = "BATCHES_OFF", 501


def status_of(error: RouterError) -> int:
    return error.status if isinstance(error, HttpRefusal) else STATUSES[code_of(error)][0]


def error_body(error: RouterError, names: Mapping[str, str] = NO_NAMES) -> dict[str, Any]:
    """Return OpenAI's error body. `names` maps fields of GenerateRequest to the names in the client's body."""
    kind = "invalid_request_error" if isinstance(error, HttpRefusal) else STATUSES[code_of(error)][1]
    message = error.message
    for violation in error.violations:
        message = message.replace(f"{violation.field}:", f"{json_name(violation.field, names)}:")
    for field, name in names.items():
        # A message may also name other fields: "must be at most max_tokens".
        if field.startswith("sampling."):
            message = _renamed(message, field.removeprefix("sampling."), name)
    param = next((json_name(violation.field, names) for violation in error.violations), None)
    return {"error": {"message": message, "type": kind, "param": param, "code": error.reason.lower()}}


def _renamed(message: str, field: str, name: str) -> str:
    """Return the message with a field's name replaced, except between backticks, where the name of a model stands."""
    return re.sub(rf"`[^`]*`|\b{field}\b", lambda found: name if found[0] == field else found[0], message)


def error_headers(error: RouterError) -> dict[str, str]:
    is_worth_it = not isinstance(error, HttpRefusal) and code_of(error) in WORTH_RETRYING
    headers = {"x-should-retry": "true" if is_worth_it else "false"}
    if error.retry_after_seconds is not None:
        # Whole seconds, rounded up. OpenAI's clients prefer the milliseconds.
        headers[RETRY_AFTER] = str(int(-(-error.retry_after_seconds // 1)))
        headers[RETRY_AFTER_MS] = str(round(error.retry_after_seconds * 1000))
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.metadata["allow"]
    return headers


def json_name(field: str, names: Mapping[str, str] = NO_NAMES) -> str:
    """Return the JSON name of a field of GenerateRequest. `names` are those that the client's body has for them."""
    for known, name in {**JSON_NAMES, **names}.items():
        if field == known or field.startswith(known + "."):
            return name + field[len(known) :]
    return field.removeprefix("sampling.").removeprefix("chat.")
