"""Pulls of one router's requests: counts, times and the last few, for metrics, logs and the live page.

Pure, except for the log. A pull begins when its request is sent to a worker. It ends with the worker's report, or when
the request leaves that worker. A worker that needs no pull reports none: it has the blocks by then, or fetches them for
another request. Does not own prices and plans (placement/pulls.py) or the bytes in flight
(cluster/known_workers.py).
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite

from blockyard.proto.metrics.readings import Readings
from blockyard.proto.metrics.table import PULL_ENDS
from blockyard.proto.runtime.logs import about
from blockyard.proto.v1 import session_pb2
from blockyard.router.placement.pulls import PullPlan

logger = logging.getLogger(__name__)

WHOLE, CORRUPT, CANCELLED = "whole", "corrupt", "cancelled"
RECENT_SECONDS = 30.0
"""Time for which an ended pull is shown."""
MAX_SECONDS = 3600.0
"""A longer time in a worker's report is not believed."""
MOST_RECENT = 32
"""Most running pulls that are shown, and most ended ones."""
_ENDS = {session_pb2.PullEnd.Value(f"PULL_END_{end.upper()}"): end for end in PULL_ENDS}


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """One pull. The times are on the clock of its Pulls."""

    number: int
    request_id: str
    worker_id: str
    plan: PullPlan
    began_at: float
    end: str = ""
    """Empty while it runs."""
    ended_at: float | None = None
    num_blocks: int = 0
    """Blocks that arrived intact."""
    num_bytes: int = 0
    took_seconds: float | None = None
    """Its time as the worker measured it."""

    @property
    def saved_ms(self) -> float:
        """Return the estimated saving. A pull that is not whole has saved less, and nobody knows how much."""
        saved_ms = self.plan.saved_ms
        return saved_ms if self.end == WHOLE and isfinite(saved_ms) and saved_ms > 0 else 0.0

    def seconds(self, now: float) -> float:
        """Return the time until its end, or until now."""
        if self.took_seconds is not None:
            return self.took_seconds
        return (now if self.ended_at is None else self.ended_at) - self.began_at


class Pulls:
    """Pulls of one router."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self._num_begun = 0
        self._running: dict[int, Pull] = {}
        self._ended: deque[Pull] = deque(maxlen=MOST_RECENT)
        self._ends = Counter[str]()
        self._blocks = self._bytes = 0
        self._saved_seconds = 0.0
        self._setup_seconds = self._transfer_seconds = 0.0

    def begin(self, request_id: str, worker_id: str, plan: PullPlan) -> Pull:
        self._num_begun += 1
        pull = Pull(
            number=self._num_begun,
            request_id=request_id,
            worker_id=worker_id,
            plan=plan,
            began_at=self.now(),
        )
        self._running[pull.number] = pull
        return pull

    def answered(self, pull: Pull | None) -> None:
        """Record that the request has its first token. So no pull runs for it, though a late report may come."""
        if pull is not None:
            self._running.pop(pull.number, None)

    def end(self, pull: Pull | None, report: session_pb2.PullReport | None = None) -> None:
        """Record the end of a pull. Ignore a pull that has ended.

        Without a report the request has left its worker. Then a pull that still runs is cancelled.
        """
        if pull is None or pull.end:
            return
        is_running = self._running.pop(pull.number, None) is not None
        if report is None and not is_running:
            return
        pull.ended_at, pull.end = self.now(), CANCELLED
        if report is not None:
            pull.end = _ENDS.get(report.end, CORRUPT)
            pull.num_blocks, pull.num_bytes = report.num_blocks, report.num_bytes
            self._add_times(pull, report)
        self._ended.append(pull)
        self._ends[pull.end] += 1
        self._blocks += pull.num_blocks
        self._bytes += pull.num_bytes
        self._saved_seconds += pull.saved_ms / 1000
        with about(pull.request_id):
            _log(pull)

    def _add_times(self, pull: Pull, report: session_pb2.PullReport) -> None:
        times = report.setup_seconds, report.transfer_seconds
        if all(0 <= seconds <= MAX_SECONDS for seconds in times):
            pull.took_seconds = sum(times)
            self._setup_seconds += report.setup_seconds
            self._transfer_seconds += report.transfer_seconds

    def recent(self) -> list[Pull]:
        """Return pulls to show, newest first: those that run, then those that have ended lately."""
        now = self.now()
        running = list(self._running.values())[-MOST_RECENT:]
        ended = [
            pull
            for pull in self._ended
            if pull.ended_at is not None and now - pull.ended_at <= RECENT_SECONDS
        ]
        return running[::-1] + ended[::-1]

    def readings(self) -> Readings:
        return {
            "router_pulls": dict(self._ends),
            "router_pulled_blocks": self._blocks,
            "router_pulled_bytes": self._bytes,
            "router_pull_saved_seconds": self._saved_seconds,
            "router_pull_setup_seconds": self._setup_seconds,
            "router_pull_transfer_seconds": self._transfer_seconds,
        }


def recent_of(of_models: Iterable[Pulls]) -> list[Pull]:
    """Return pulls of all models to show, newest first: those that run, then those that have ended lately.

    At most MOST_RECENT of each. All have the same clock.
    """
    shown = [pull for pulls in of_models for pull in pulls.recent()]
    running = [pull for pull in shown if pull.ended_at is None]
    ended = [pull for pull in shown if pull.ended_at is not None]
    running.sort(key=lambda pull: pull.began_at, reverse=True)
    ended.sort(key=lambda pull: pull.ended_at or 0.0, reverse=True)
    return running[:MOST_RECENT] + ended[:MOST_RECENT]


def _log(pull: Pull) -> None:
    match pull.end:
        case "corrupt":
            level = logging.WARNING
        case "whole" | "cancelled" | "avoided":
            # Common, or a consequence of an end that was logged.
            level = logging.DEBUG
        case _:
            level = logging.INFO
    logger.log(
        level,
        "pull %d of worker %s from worker %s ended %s: %d blocks, %.0f ms of %.0f planned",
        pull.number,
        pull.worker_id,
        pull.plan.source.worker_id,
        pull.end,
        pull.num_blocks,
        1000 * pull.seconds(pull.ended_at or 0.0),
        pull.plan.time_ms,
    )
