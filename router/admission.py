"""Who may come in, and who may go on to a worker.

`AdmissionLedger` charges requests, by their outputs, and estimated prompt tokens before anything costly is done with
them, and refuses beyond the limits. `WorkerGate` keeps the router from hammering a worker whose short queue is
full: after a BUSY, one request goes for each place known to be free. Pure: time comes from the caller. Does not own
the waiting of those that found no worker (waiting_line.py) nor the choice of one (placement.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from blockyard.router.errors import Overloaded

BYTES_PER_TOKEN = 4
"""Of text, for an estimate that costs nothing; real tokenizers take 3 to 5."""
RETRY_AFTER_SECONDS = 0.5
PROBE_SECONDS = 0.1
"""A worker that said BUSY gets one request to try after so long, even if nothing was heard of it. For as long its
load reports may be older than its BUSY and are not believed when they say that nobody waits there."""
OFFERED_PLACES = 4
"""For each report that nobody waits. If a long line rushed in at the first, most of it would come back."""


def estimate_tokens(text_bytes: int) -> int:
    """Prompt tokens expected of a text; at least one."""
    return text_bytes // BYTES_PER_TOKEN + 1


class AdmissionLedger:
    """What is admitted now. A charge is given back exactly as it was taken."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.requests = 0
        """One with several outputs counts as so many."""
        self.tokens = 0

    @contextmanager
    def charge(self, tokens: int, *, outputs: int = 1) -> Iterator[None]:
        """Holds a request's outputs and its tokens for the life of the context. Raises Overloaded beyond a limit.

        A single request larger than a limit is let in when nothing else is: it could else never run.
        """
        if self.requests and self.requests + outputs > self._max_requests:
            raise Overloaded(
                "too many requests are running or waiting", retry_after_seconds=RETRY_AFTER_SECONDS
            )
        if self.requests and self.tokens + tokens > self._max_tokens:
            raise Overloaded(
                "too many prompt tokens are running or waiting", retry_after_seconds=RETRY_AFTER_SECONDS
            )
        self.requests += outputs
        self.tokens += tokens
        try:
            yield
        finally:
            self.requests -= outputs
            self.tokens -= tokens


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
            self.places = OFFERED_PLACES
            self.offered_at = now
        elif now >= self.offered_at + PROBE_SECONDS:
            self.is_shut = False
