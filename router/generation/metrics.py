"""Metrics of requests, as clients see them: times, tokens and outcomes.

Called for each piece of each output, which costs 0.4 us (bench/metrics.py). Does not own what other parts count
themselves (metric_readings.py), or how metrics leave the process.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from blockyard.proto.metrics.readings import Histogram, Readings, by_name
from blockyard.proto.metrics.table import METRICS, MOST_TENANTS, OTHER_TENANTS
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import Overloaded, as_router_error, is_gone
from blockyard.router.generation.registry import RequestRecord

OK = "OK"
CANCELLED = "CANCELLED"
FINISHES = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}
"""Names of finish reasons, in metrics and in OpenAI's API."""


def outcome_of(error: BaseException) -> str:
    """Return the outcome of a request that ended by this error: CANCELLED, or the reason that the client gets."""
    # Over HTTP a vanished client shows as a failed write, over gRPC as a cancelled call.
    is_cancelled = not isinstance(error, Exception) or is_gone(error)
    return CANCELLED if is_cancelled else as_router_error(error).reason


@dataclass(slots=True)
class TenantCount:
    """Counts of one tenant."""

    requests: int = 0
    refusals: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class TenantCounts:
    """Counts by tenant, for a bounded number of tenants.

    A tenant gets its own count with its first token, while any are free. All other tenants and unnamed calls share one
    count. A refused call gets none, because invented names would use up all of them.
    """

    def __init__(self) -> None:
        self._counts = {OTHER_TENANTS: TenantCount()}

    def served(self, tenant: str) -> TenantCount:
        """Return the count of a tenant that gets its first token, after giving it a count of its own if one is free."""
        if tenant and tenant not in self._counts and len(self._counts) < MOST_TENANTS:
            self._counts[tenant] = TenantCount()
        return self.of(tenant)

    def of(self, tenant: str) -> TenantCount:
        return self._counts.get(tenant, self._counts[OTHER_TENANTS])

    def readings(self) -> Readings:
        return {
            f"tenant_{name}": {tenant: getattr(count, name) for tenant, count in self._counts.items()}
            for name in ("requests", "refusals", "prompt_tokens", "generated_tokens")
        }


@dataclass(slots=True)
class CallNote:
    """Facts about a call that become known while it runs."""

    tenant: str = ""


class RouterMetrics:
    """Metrics of one router. `clock` is the clock of its requests' arrivals."""

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
        self.prefill = Histogram(table["prefill_seconds"])
        self.decode = Histogram(table["decode_seconds"])
        self.request_prompt = Histogram(table["request_prompt_tokens"])
        self.request_generated = Histogram(table["request_generated_tokens"])
        self.tenants = TenantCounts()

    @contextmanager
    def call(self) -> Iterator[CallNote]:
        """Count one call for generation by its outcome and tenant, and measure its time if it succeeds."""
        arrival, note = self.clock(), CallNote()
        try:
            with self._of_tenant(note):
                yield note
        except (asyncio.CancelledError, Exception) as error:
            self.outcomes[outcome_of(error)] += 1
            raise
        self.outcomes[OK] += 1
        self.whole.observe(self.clock() - arrival)

    @contextmanager
    def _of_tenant(self, note: CallNote) -> Iterator[None]:
        is_refused = False
        try:
            yield
        except Exception as error:
            is_refused = isinstance(as_router_error(error), Overloaded)
            raise
        finally:
            count = self.tenants.of(note.tenant)
            count.requests += 1
            count.refusals += is_refused

    def readings(self) -> Readings:
        return {
            **self.tenants.readings(),
            "prefill_seconds": self.prefill.read(),
            "decode_seconds": self.decode.read(),
            "request_prompt_tokens": self.request_prompt.read(),
            "request_generated_tokens": self.request_generated.read(),
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
    """Measures the pieces of one request, as a context manager. `record` has its arrival and the time it was sent."""

    __slots__ = ("_began", "_is_prefetch", "_last", "_metrics", "_num_generated", "_record", "_tenant")

    def __init__(self, metrics: RouterMetrics, record: RequestRecord, *, is_prefetch: bool = False) -> None:
        """A prefetch has no first token, and nobody waits for it: it counts in no histogram of times."""
        self._is_prefetch = is_prefetch
        self._metrics = metrics
        self._record = record
        self._tenant = metrics.tenants.of(record.tenant)
        self._began = 0.0
        """Time of the first piece."""
        self._last: dict[int, float] = {}
        """Time of each output's latest piece, by index."""
        self._num_generated = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._last and not self._is_prefetch:
            self._metrics.decode.observe(max(self._last.values()) - self._began)
            self._metrics.request_generated.observe(self._num_generated)

    def piece(self, index: int, num_tokens: int) -> None:
        """Record that the next tokens of an output go to the client now."""
        metrics, now, last = self._metrics, self._metrics.clock(), self._last.get(index)
        if last is not None:
            metrics.gaps.observe(now - last)
        elif not self._last:
            self._begin(now)
        self._last[index] = now
        metrics.generated_tokens += num_tokens
        self._tenant.generated_tokens += num_tokens
        self._num_generated += num_tokens

    def end(self, reason: inference_pb2.FinishReason) -> None:
        """Record the end of an output."""
        self._metrics.finishes[FINISHES[reason]] += 1

    def _begin(self, now: float) -> None:
        metrics, record, progress = self._metrics, self._record, self._record.progress
        self._began = now
        self._tenant = metrics.tenants.served(record.tenant)
        if not self._is_prefetch:
            metrics.first_token.observe(now - record.arrival)
        if progress.sent_at is not None and not self._is_prefetch:
            metrics.queued.observe(progress.sent_at - record.arrival)
            metrics.prefill.observe(now - progress.sent_at)
        metrics.request_prompt.observe(record.prompt_tokens)
        self._tenant.prompt_tokens += record.prompt_tokens
        metrics.prompt_tokens += record.prompt_tokens
        metrics.cached_tokens += progress.cached_tokens or 0
