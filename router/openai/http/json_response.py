"""JSON responses: how values are encoded, and responses with a JSON body."""

import json
from collections.abc import Mapping
from typing import Any

from aiohttp.web import Response
from blockyard.router.errors import RouterError
from blockyard.router.openai.http.errors import NO_NAMES, error_body, error_headers, status_of

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"))


def encoded(value: Any) -> bytes:
    """Encode our own values, which contain neither NaN nor lone surrogates."""
    return _ENCODER.encode(value).encode()


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return json_body_response(encoded(value), status=status, headers=headers)


def json_body_response(
    body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with a body that is encoded already."""
    return Response(
        body=body, status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def error_response(error: RouterError, names: Mapping[str, str] = NO_NAMES) -> Response:
    """Return the response of an error in OpenAI's form."""
    return json_response(error_body(error, names), status=status_of(error), headers=error_headers(error))
