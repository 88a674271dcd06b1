"""Links: one router's stream as the session sees it, and the routes from requests to their routers.

Routes and `Link.requests` are changed on the engine's thread. The outbox and the grammars are changed on the event
loop's thread (session.py).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from blockyard.proto.runtime.logs import about
from blockyard.proto.v1.session_pb2 import RejectReason, ToRouter
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineLoad, SequenceOutput, StepResult
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.phases import Phase
from blockyard.worker.sequences.sequence import SequenceState
from blockyard.worker.session.compiling import Compiling
from blockyard.worker.session.outbox import Outbox

logger = logging.getLogger(__name__)

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


class Routes:
    """Routes of the requests that the engine has. Used on the engine's thread only."""

    def __init__(self, *, withdraw: Callable[[bytes], object]) -> None:
        """`withdraw` takes the marks of a prompt that has ended before it was computed."""
        self._withdraw = withdraw
        self._routes: dict[RequestId, Route] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._routes)

    def get(self, request_id: RequestId) -> Route | None:
        return self._routes.get(request_id)

    def client_request_ids(self) -> dict[RequestId, str]:
        return {key: route.request_id for key, route in self._routes.items()}

    def add(self, request_id: RequestId, route: Route) -> None:
        route.link.requests[route.handle] = request_id
        self._routes[request_id] = route

    def forget(self, link: Link, handle: int, request_id: RequestId) -> None:
        link.requests.pop(handle, None)
        route = self._routes.pop(request_id, None)
        if route is not None and route.marks:
            self._withdraw(route.marks)

    def phases_of(self, result: StepResult) -> list[tuple[Route, Phase]]:
        return [
            (route, phase)
            for request_id, phase in result.phases
            if (route := self._routes.get(request_id)) is not None
        ]

    def outputs_of(self, result: StepResult) -> tuple[list[tuple[Route, SequenceOutput]], set[RequestId]]:
        """Return a step's outputs, and the requests with first tokens that other workers are to continue.

        Forget the requests that have ended.
        """
        outputs, begun = [], set[RequestId]()
        for output in result.outputs:
            route = self._routes.get(output.request_id)
            if route is None:
                continue
            outputs.append((route, output))
            if output.token_ids or output.embedding:
                route.marks = b""
                if route.hands_over:
                    begun.add(output.request_id)
            if output.state is SequenceState.FAILED and not output.has_no_choice:
                with about(route.request_id):
                    logger.error("its step failed")
            if output.is_last:
                self.forget(route.link, route.handle, output.request_id)
        return outputs, begun

    def end(self, request_ids: Iterable[RequestId], engine: Engine) -> list[Route]:
        """End those of the requests that are still here. Return their routes."""
        ended = []
        for request_id in request_ids:
            route = self._routes.get(request_id)
            if route is not None:
                engine.cancel(request_id)
                self.forget(route.link, route.handle, request_id)
                ended.append(route)
        return ended

    def cancel(self, link: Link, handle: int, index: int | None, engine: Engine) -> None:
        """Cancel a request, or one of its outputs."""
        request_id = link.requests.get(handle)
        if request_id is not None and not engine.cancel(request_id, index):
            self.forget(link, handle, request_id)

    def cancel_all(self, link: Link, engine: Engine) -> None:
        """Cancel all requests of one router."""
        for handle in tuple(link.requests):
            self.cancel(link, handle, None, engine)
