"""Whether one worker may get one more request.

Keeps the router from hammering a worker whose short queue is full: after a BUSY, one request goes for each place known
to be free. Pure: time comes from the caller. Does not own the waiting of those that found no worker
(dispatch/waiting_line.py) nor the choice of one (placement/policies.py).
"""

from dataclasses import dataclass

PROBE_SECONDS = 0.1
"""A worker that said BUSY gets one request to try after so long, even if nothing was heard of it. For as long its
load reports may be older than its BUSY and are not believed when they say that nobody waits there."""
OFFERED_PLACES = 4
"""For each report that nobody waits. If a long line rushed in at the first, most of it would come back."""
REPORT_SECONDS = 0.02
"""Reports may be so much older than the last request that was sent: each would offer the same places again."""


@dataclass(slots=True)
class WorkerGate:
    """Whether one worker may get one more request. Open until it says BUSY."""

    is_shut: bool = False
    places: int = 0
    """While shut: requests that left the worker's queue and have not been replaced."""
    probe_at: float = 0.0
    shut_at: float = 0.0
    """When it last said BUSY."""
    offered_at: float = 0.0
    """When, while shut, it last had places that somebody took or that were new."""

    def admits(self, now: float) -> bool:
        return not self.is_shut or self.places > 0 or now >= self.probe_at

    def took_one(self, now: float) -> None:
        if self.is_shut:
            self.places = max(self.places - 1, 0)
            self.probe_at = now + PROBE_SECONDS
            self.offered_at = now

    def freed_one(self) -> None:
        if self.is_shut:
            self.places += 1

    def shut(self, now: float) -> None:
        """It said BUSY. Its words come in order: whatever place it freed before, it was full when it said so."""
        self.is_shut = True
        self.places = 0
        self.shut_at = now
        self.probe_at = now + PROBE_SECONDS

    def nobody_waits(self, now: float) -> None:
        """The worker reported an empty queue: a few may go to it, and once nobody takes that up, all who come."""
        if now < self.shut_at + PROBE_SECONDS:
            return
        if self.places == 0:
            if now < self.offered_at + REPORT_SECONDS:
                return
            self.places = OFFERED_PLACES
            self.offered_at = now
        elif now >= self.offered_at + PROBE_SECONDS:
            self.is_shut = False
