"""Rate limit headers: what is left of the current minute, for OpenAI's clients.

Does not own the count (admission/rate_limits.py).
"""

from aiohttp.web import BaseRequest
from blockyard.proto.naming.headers import RATE_LIMIT, RATE_REMAINING, RATE_RESET
from blockyard.router.admission.auth import PRINCIPAL
from blockyard.router.admission.rate_limits import KINDS
from blockyard.router.calls.bounds import CallBounds
from blockyard.router.errors import RouterError
from blockyard.router.openai.http.call import http_call


def rate_headers(bounds: CallBounds, request: BaseRequest) -> dict[str, str]:
    """Return headers about the limit with the least left, the API token's or the tenant's. Empty if no limit
    applies."""
    if PRINCIPAL.get() is None:
        return {}
    try:
        limited = bounds.caller(http_call(request, default_timeout_seconds=1.0)).limited
    except RouterError:
        return {}  # the response itself has the error
    headers: dict[str, str] = {}
    for kind in KINDS:
        standing = bounds.rates.standing(limited, kind)
        if standing is not None:
            headers[f"{RATE_LIMIT}-{kind}"] = str(standing.per_minute)
            headers[f"{RATE_REMAINING}-{kind}"] = str(standing.remaining)
            headers[f"{RATE_RESET}-{kind}"] = f"{standing.full_in_seconds:.3f}s"
    return headers
