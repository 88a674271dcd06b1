"""Links: one router's stream as the session sees it, and the route from a request to its router.

`Link.requests` is changed on the engine's thread. The outbox and the grammars are changed on the event loop's thread
(session.py).
"""

import asyncio
from dataclasses import dataclass, field

from blockyard.proto.v1.session_pb2 import RejectReason, ToRouter
from blockyard.worker.engine_types import EngineLoad
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.session.compiling import Compiling
from blockyard.worker.session.outbox import Outbox

LOAD_REPORT_SECONDS = 0.05
"""Least time between reports of load alone to one router."""
MAX_REPORT_SECONDS = 1.0
"""Most such time that a router may ask for."""
REPORTS_A_SECOND = 200
"""Most reports of load alone to all routers together. They take a worker about 2 % of a core."""


def report_seconds(num_routers: int, asked_seconds: float) -> float:
    """Return the time between reports of load alone to one router. Outputs of its requests do not wait for it."""
    asked_seconds = asked_seconds if asked_seconds > 0 else 0.0
    return max(LOAD_REPORT_SECONDS, min(asked_seconds, MAX_REPORT_SECONDS), num_routers / REPORTS_A_SECOND)


@dataclass(slots=True, eq=False)
class Link:
    """One router's stream: the messages that wait for it, and its requests by handle, the router's number of each."""

    compiling: Compiling
    requests: dict[int, RequestId] = field(default_factory=dict)
    outbox: Outbox = field(default_factory=Outbox)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    asked_report_seconds: float = 0.0
    """Time between reports of load alone that the router asked for in its last ping."""

    def reject(self, handle: int, reason: RejectReason, detail: str = "") -> None:
        self.outbox.reject(handle, reason, detail)
        self.has_news.set()

    def tell_draining(self, is_draining: bool) -> None:
        self.outbox.tell_draining(is_draining)
        self.has_news.set()

    def take(self, load: EngineLoad) -> list[ToRouter]:
        self.has_news.clear()
        return self.outbox.take(load)


@dataclass(frozen=True, slots=True)
class Route:
    """The router of a request, and the handle and id by which that router knows the request."""

    link: Link
    handle: int
    request_id: str
