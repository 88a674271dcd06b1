"""Errors in Anthropic's form: type, message and the request's id, for its routes alone.

Does not own the mapping of errors to statuses (../http/errors.py), except where Anthropic's API has another one.
"""

from collections.abc import Mapping
from typing import Any

from aiohttp.web import Response
from blockyard.router.errors import ContextLengthExceeded, Overloaded, RateLimited, RouterError
from blockyard.router.openai.anthropic.request import NAMES, THREAD
from blockyard.router.openai.http.errors import NO_NAMES, error_body, error_headers, status_of
from blockyard.router.openai.http.json_response import json_response

OVERLOADED = 529
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""Anthropic's error types by HTTP status. Any other is `invalid_request_error`."""


def anthropic_status(error: RouterError) -> int:
    """Return the HTTP status: 529 where the router has no room. 429 is for a caller's own limit."""
    if isinstance(error, Overloaded) and not isinstance(error, RateLimited):
        return OVERLOADED
    return status_of(error)


def anthropic_error(
    error: RouterError, request_id: str, names: Mapping[str, str] = NO_NAMES
) -> dict[str, Any]:
    message: str = error_body(error, {**NAMES, **names})["error"]["message"]
    if isinstance(error, ContextLengthExceeded):
        # Clients that make room for more, such as Claude Code, look for these words.
        message = f"prompt is too long: {message.removeprefix('messages: ')}"
    kind = TYPES.get(anthropic_status(error), "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": message}
    if any(violation.field == THREAD for violation in error.violations):
        # Anthropic's runner of tools asks for a thread, and by this error goes on without one.
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
    return {"type": "error", "error": told, "request_id": request_id}


def anthropic_response(error: RouterError, request_id: str, names: Mapping[str, str] = NO_NAMES) -> Response:
    """Return the response of an error."""
    body = anthropic_error(error, request_id, names)
    return json_response(body, status=anthropic_status(error), headers=error_headers(error))
