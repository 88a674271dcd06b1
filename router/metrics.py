"""What becomes of requests, counted where clients feel it: times, tokens, ends.

Called for each piece of each output, which costs 0.3 us (bench/metrics.py). Does not own what other parts count of
themselves (metric_readings.py) nor how it leaves the process.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blockyard.proto.metric_table import METRICS
from blockyard.proto.metrics import Histogram, Readings, by_name
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import as_router_error, is_gone
from blockyard.router.requests import RequestRecord

OK = "OK"
CANCELLED = "CANCELLED"
FINISHES = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}
"""In metrics and in OpenAI's API."""


class RouterMetrics:
    """One for each router; `clock` is that of its requests' arrivals."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        table = by_name(METRICS)
        self.clock = clock
        self.outcomes: Counter[str] = Counter()
        self.finishes: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.first_token = Histogram(table["time_to_first_token_seconds"])
        self.gaps = Histogram(table["inter_token_latency_seconds"])
        self.whole = Histogram(table["request_seconds"])
        self.queued = Histogram(table["queue_seconds"])

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around all of one request for generation: however it ends is counted once."""
        arrival = self.clock()
        try:
            yield
        except asyncio.CancelledError:
            self.outcomes[CANCELLED] += 1
            raise
        except Exception as error:
            # Over HTTP a client that goes shows as a write that fails, over gRPC as a cancelled call.
            self.outcomes[CANCELLED if is_gone(error) else as_router_error(error).reason] += 1
            raise
        self.outcomes[OK] += 1
        self.whole.observe(self.clock() - arrival)

    def readings(self) -> Readings:
        return {
            "time_to_first_token_seconds": self.first_token.read(),
            "inter_token_latency_seconds": self.gaps.read(),
            "request_seconds": self.whole.read(),
            "queue_seconds": self.queued.read(),
            "requests": dict(self.outcomes),
            "outputs": dict(self.finishes),
            "router_prompt_tokens": self.prompt_tokens,
            "router_cached_tokens": self.cached_tokens,
            "router_generated_tokens": self.generated_tokens,
        }


class RequestMeter:
    """Of one request, whose record says how it went until its first token."""

    __slots__ = ("_last", "_metrics", "_record")

    def __init__(self, metrics: RouterMetrics, record: RequestRecord) -> None:
        self._metrics = metrics
        self._record = record
        self._last: dict[int, float] = {}
        """When each output's last piece came."""

    def piece(self, index: int, num_tokens: int) -> None:
        """An output's next tokens go to the client."""
        metrics, now, last = self._metrics, self._metrics.clock(), self._last.get(index)
        if last is not None:
            metrics.gaps.observe(now - last)
        elif not self._last:
            self._begin(now)
        self._last[index] = now
        metrics.generated_tokens += num_tokens

    def end(self, reason: inference_pb2.FinishReason) -> None:
        """An output has ended."""
        self._metrics.finishes[FINISHES[reason]] += 1

    def _begin(self, now: float) -> None:
        metrics, record, progress = self._metrics, self._record, self._record.progress
        metrics.first_token.observe(now - record.arrival)
        if progress.sent_at is not None:
            metrics.queued.observe(progress.sent_at - record.arrival)
        metrics.prompt_tokens += record.prompt_tokens
        metrics.cached_tokens += progress.cached_tokens or 0
