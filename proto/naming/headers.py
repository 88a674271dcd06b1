"""Header names and the range of priorities, on which clients, routers and workers agree.

Constants alone. Does not own what a header's value may be (router/request/, router/admission/).
"""

AUTHORIZATION = "authorization"
"""`Bearer TOKEN`, in gRPC metadata and HTTP headers."""
TENANT = "blockyard-tenant"
"""The tenant of a call, in gRPC metadata and HTTP headers."""
STATUS_DETAILS = "grpc-status-details-bin"
"""A serialised google.rpc.Status, in the trailing metadata of a gRPC error."""
RETRY_PUSHBACK_MS = "grpc-retry-pushback-ms"
"""The retry delay in trailing metadata, for gRPC's own retries. Our client reads it where STATUS_DETAILS is lost."""

TIMEOUT_SECONDS = "blockyard-timeout-seconds"
"""The client's deadline in seconds from the call's arrival. HTTP only: gRPC has deadlines of its own."""
REQUEST_ID = "X-Request-Id"
"""The id of an HTTP call, in its request and its response."""
IGNORED = "Blockyard-Ignored"
"""Fields of an HTTP body that have no effect, in the response."""
RETRY_AFTER = "Retry-After"
"""Whole seconds after which an HTTP call may be retried."""
RETRY_AFTER_MS = "Retry-After-Ms"
"""The same delay in milliseconds, which OpenAI's clients prefer."""
RATE_LIMIT = "x-ratelimit-limit"
"""Followed by `-requests` or `-tokens`, as the next two: the limit per minute."""
RATE_REMAINING = "x-ratelimit-remaining"
"""How much of the limit is left."""
RATE_RESET = "x-ratelimit-reset"
"""Seconds until the limit is full again."""

MAX_PRIORITY = 100
"""A request's priority is from -MAX_PRIORITY to MAX_PRIORITY. A lower value is served earlier."""
