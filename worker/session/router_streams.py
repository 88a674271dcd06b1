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
    tells_arrivals_at: float = 0.0
    """Time on the event loop's clock at which the router hears of the last arrival at the latest."""
    _load_timer: asyncio.TimerHandle | None = None
    """Sets `has_news` for a load that nothing else is sent with."""
    asked_report_seconds: float = 0.0
    """Time between reports of load alone that the router asked for in its last ping."""

    def reject(self, handle: int, reason: RejectReason, detail: str = "") -> None:
        self.outbox.reject(handle, reason, detail)
        self.has_news.set()

    def tell_draining(self, is_draining: bool) -> None:
        self.outbox.tell_draining(is_draining)
        self.has_news.set()

    def tell_arrival(self, marks: bytes, *, is_own: bool, every_seconds: float) -> None:
        """Report the marks of a prompt that has reached the worker.

        A router learns of another router's prompt at once, but not more often than `every_seconds`. It knows its own.
        """
        self.outbox.tell_arrival(marks)
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not is_own and self.tells_arrivals_at <= now:
            wait_seconds = max(self.tells_arrivals_at + every_seconds - now, 0.0)
            self.tells_arrivals_at = now + wait_seconds
            loop.call_later(wait_seconds, self.has_news.set)

    def tell_load_within(self, seconds: float) -> None:
        """Have the load sent after this time at most. Call it when the load may have changed."""
        if self._load_timer is None and not self.has_news.is_set():
            self._load_timer = asyncio.get_running_loop().call_later(seconds, self.has_news.set)

    def take(self, load: EngineLoad) -> list[ToRouter]:
        self.has_news.clear()
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None
        return self.outbox.take(load)


@dataclass(slots=True)
class Route:
    """The router of a request, and the handle and id by which that router knows the request."""

    link: Link
    handle: int
    request_id: str
    marks: bytes = b""
    """Marks of the prompt, until its first output."""
    hands_over: bool = False
    """Whether another worker is to continue the request from its first tokens on."""
