"""Headers by which OpenAI's clients see what is left of their minute. Does not count it (admission/rate_limits.py)."""

from aiohttp.web import BaseRequest
from blockyard.proto.naming.headers import RATE_LIMIT, RATE_REMAINING, RATE_RESET
from blockyard.router.admission.auth import PRINCIPAL
from blockyard.router.admission.rate_limits import KINDS
from blockyard.router.calls.bounds import CallBounds
from blockyard.router.errors import RouterError
from blockyard.router.openai.http.call import http_call


def rate_headers(bounds: CallBounds, request: BaseRequest) -> dict[str, str]:
    """Of what is left least, the token's or the tenant's; none where nothing limits."""
    if PRINCIPAL.get() is None:
        return {}
    try:
        limited = bounds.caller(http_call(request, default_timeout_seconds=1.0)).limited
    except RouterError:
        return {}  # said by the answer itself
    headers: dict[str, str] = {}
    for kind in KINDS:
        standing = bounds.rates.standing(limited, kind)
        if standing is not None:
            headers[f"{RATE_LIMIT}-{kind}"] = str(standing.per_minute)
            headers[f"{RATE_REMAINING}-{kind}"] = str(standing.remaining)
            headers[f"{RATE_RESET}-{kind}"] = f"{standing.full_in_seconds:.3f}s"
    return headers
