"""Worker gate: decides whether one worker may get one more request.

It spares a worker whose short queue is full. A worker answers BUSY (REJECT_REASON_BUSY) to a request that finds it
full. The gate then admits one request for each queue position that is known to be free. Pure: the caller gives the
time. Does not own requests that wait for any worker (dispatch/waiting_line.py) or the choice of a worker
(placement/policies.py).
"""

from dataclasses import dataclass

PROBE_SECONDS = 0.1
"""Time after a BUSY, or after the last request sent, until one request is sent as a probe without news of the worker.

For this time after a BUSY, a report of an empty queue is ignored, because it may be older than the BUSY.
"""
OFFERED_PERMITS = 4
"""Requests admitted per report of an empty queue. If all waiting requests were sent at once, most would be refused."""
REPORT_SECONDS = 0.02
"""A report that arrives this soon after positions were offered or taken may be older, so it offers none again."""


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
        """Record a BUSY. Messages arrive in order, so all positions that were known to be free are taken."""
        self.is_shut = True
        self.permits = 0
        self.shut_at = now
        self.probe_at = now + PROBE_SECONDS

    def queue_was_empty(self, now: float) -> None:
        """Record a report of an empty queue: offer a few positions. If some stay free for PROBE_SECONDS, open the
        gate."""
        if now < self.shut_at + PROBE_SECONDS:
            return
        if self.permits == 0:
            if now < self.offered_at + REPORT_SECONDS:
                return
            self.permits = OFFERED_PERMITS
            self.offered_at = now
        elif now >= self.offered_at + PROBE_SECONDS:
            self.is_shut = False
