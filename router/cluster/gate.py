"""Worker gate: decides whether one worker may get one more request.

It spares a worker whose short queue is full. After a BUSY it admits one request for each queue position that is known
to be free. Pure: the caller gives the time. Does not own requests that wait for any worker (dispatch/waiting_line.py)
or the choice of a worker (placement/policies.py).
"""

from dataclasses import dataclass

PROBE_SECONDS = 0.1
"""Time after a BUSY until one request is sent as a probe, even without news of the worker.

For the same time a load report may be older than the BUSY, so its empty queue is ignored.
"""
OFFERED_PERMITS = 4
"""Requests admitted per report of an empty queue. If all waiting requests went at once, most would be refused."""
REPORT_SECONDS = 0.02
"""A load report may be this much older than the last request sent. Otherwise each report would offer the same
positions."""


@dataclass(slots=True)
class WorkerGate:
    """Gate of one worker. Open until the worker answers BUSY."""

    is_shut: bool = False
    permits: int = 0
    """While shut: queue positions that became free and have not been filled."""
    probe_at: float = 0.0
    shut_at: float = 0.0
    """Time of the last BUSY."""
    offered_at: float = 0.0
    """While shut: when positions were last offered or taken."""

    def admits(self, now: float) -> bool:
        return not self.is_shut or self.permits > 0 or now >= self.probe_at

    def took_one(self, now: float) -> None:
        if self.is_shut:
            self.permits = max(self.permits - 1, 0)
            self.probe_at = now + PROBE_SECONDS
            self.offered_at = now

    def freed_one(self) -> None:
        if self.is_shut:
            self.permits += 1

    def shut(self, now: float) -> None:
        """Record a BUSY. Messages arrive in order, so any position freed before was filled again."""
        self.is_shut = True
        self.permits = 0
        self.shut_at = now
        self.probe_at = now + PROBE_SECONDS

    def queue_was_empty(self, now: float) -> None:
        """Record a report of an empty queue: offer a few positions, and open the gate once no request has taken
        them."""
        if now < self.shut_at + PROBE_SECONDS:
            return
        if self.permits == 0:
            if now < self.offered_at + REPORT_SECONDS:
                return
            self.permits = OFFERED_PERMITS
            self.offered_at = now
        elif now >= self.offered_at + PROBE_SECONDS:
            self.is_shut = False
