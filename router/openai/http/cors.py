"""Which web pages may call the port from a browser: exactly those that the operator names, and none by default.

A page elsewhere reads no answer, and a browser sends its JSON only after a question (a preflight), which gets a yes for
a named origin alone. Owns these headers. Does not own who calls: a preflight carries no token, and says nothing else.
"""

import re
from collections.abc import Sequence

from aiohttp.web import BaseRequest, Response
from blockyard.proto.naming.headers import (
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
"""A browser remembers a yes for so long."""
EXPOSED = (
    *(REQUEST_ID, IGNORED, RETRY_AFTER, RETRY_AFTER_MS),
    *(f"{header}-{kind}" for header in (RATE_LIMIT, RATE_REMAINING, RATE_RESET) for kind in KINDS),
)
"""Headers of an answer that scripts may read."""
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(?: *, *[A-Za-z0-9-]{1,64}){0,63}")


def cors_headers(origins: Sequence[str], request: BaseRequest) -> dict[str, str]:
    """Returns the CORS headers of an answer."""
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
    """The answer to a browser's question whether a page may send a request; None: this is none that gets a yes."""
    is_question = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not is_question or _allowed_origin(origins, request) is None:
        return None
    headers = {
        "Access-Control-Allow-Methods": "GET, POST",
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
