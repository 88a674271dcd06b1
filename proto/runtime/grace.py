"""The grace period of a drain in seconds: one default and one bound for routers, workers and commands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an engine without a server reads the worker's config, and needs no protobuf
    from blockyard.proto.v1.admin_pb2 import DrainWorkerRequest

DEFAULT_GRACE_SECONDS = 30.0
MAX_GRACE_SECONDS = 86_400.0
GRACE_RULE = f"must be from 0 to {MAX_GRACE_SECONDS:g}"


def grace_seconds_of(request: DrainWorkerRequest) -> float | None:
    """Return a drain request's grace period in seconds, the default if it names none, or None if it is out of
    bounds."""
    if not request.HasField("grace_seconds"):
        return DEFAULT_GRACE_SECONDS
    seconds = request.grace_seconds
    return seconds if math.isfinite(seconds) and 0 <= seconds <= MAX_GRACE_SECONDS else None
