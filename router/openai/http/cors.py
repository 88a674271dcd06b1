"""CORS: lets web pages of the configured origins call the port from a browser. By default there are none.

A page of another origin cannot read an answer. A browser sends JSON only after a preflight, which succeeds for a
configured origin alone. Owns these headers. Does not own authentication: a preflight carries no token.
"""

import re
from collections.abc import Sequence

from aiohttp.web import BaseRequest, Response
from blockyard.proto.naming.headers import (
    ANTHROPIC_REQUEST_ID,
    IGNORED,
    RATE_LIMIT,
    RATE_REMAINING,
    RATE_RESET,
    REQUEST_ID,
    RETRY_AFTER,
    RETRY_AFTER_MS,
)
from blockyard.router.admission.rate_limits import KINDS

MAX_AGE_SECONDS = 600
"""Time for which a browser may cache a preflight."""
EXPOSED = (
    *(REQUEST_ID, ANTHROPIC_REQUEST_ID, IGNORED, RETRY_AFTER, RETRY_AFTER_MS),
    *(f"{header}-{kind}" for header in (RATE_LIMIT, RATE_REMAINING, RATE_RESET) for kind in KINDS),
)
"""Headers of an answer that a web page's scripts may read."""
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(?: *, *[A-Za-z0-9-]{1,64}){0,63}")


def cors_headers(origins: Sequence[str], request: BaseRequest) -> dict[str, str]:
    """Return the CORS headers of an answer: none if no origins are configured."""
    if not origins:
        return {}
    headers = {"Vary": "Origin"}
    if _allowed_origin(origins, request) is None:
        return headers
    return headers | {
        "Access-Control-Allow-Origin": request.headers["Origin"],
        "Access-Control-Expose-Headers": ", ".join(EXPOSED),
    }


def preflight(origins: Sequence[str], request: BaseRequest) -> Response | None:
    """Return the response to an accepted preflight, or None for any other request."""
    is_question = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not is_question or _allowed_origin(origins, request) is None:
        return None
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Max-Age": str(MAX_AGE_SECONDS),
    }
    # Clients have headers of their own, such as x-stainless-os.
    names = request.headers.get("Access-Control-Request-Headers", "")
    if _HEADER_NAMES.fullmatch(names):
        headers["Access-Control-Allow-Headers"] = names
    return Response(status=204, headers=headers)


def _allowed_origin(origins: Sequence[str], request: BaseRequest) -> str | None:
    given = request.headers.getall("Origin", [])
    return given[0] if len(given) == 1 and given[0] in origins else None
