"""History: the last 15 minutes of a cluster as a ring of points, each the difference of two readings. Pure.

A counter belongs to one incarnation of a worker, or to a router's address. A new counter counts from its first reading
on. A counter that has shrunk has begun again at zero. So neither a restart nor a late answer shows as a jump.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from blockyard.proto.v1 import cluster_pb2

LOOK_SECONDS = 10.0
WINDOW_SECONDS = 900.0
MAX_POINTS = int(WINDOW_SECONDS / LOOK_SECONDS)
MAX_SOURCES = 4096
"""Limit on counters whose last reading is kept. Those that were read longest ago are dropped first."""
LATENCIES = ("first_token", "inter_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Values for the time since the point before, latencies in seconds. None means that nothing was measured."""

    at_seconds: float
    """Time on the caller's monotonic clock."""
    tokens_per_second: float
    hit_rate: float | None
    waiting: int
    first_token_p50: float | None
    first_token_p99: float | None
    inter_token_p50: float | None
    inter_token_p99: float | None


class History:
    """Points and last counter readings of one cluster."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._counters: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._looked_at: float | None = None

    def look(
        self,
        at_seconds: float,
        infos: Mapping[str, cluster_pb2.ClusterInfo],
        workers: Iterable[cluster_pb2.Worker],
    ) -> None:
        """Read the routers' numbers by address, and one router's list of workers. Add a point of the differences.

        The first reading adds no point.
        """
        known = [worker for worker in workers if worker.incarnation]
        loads = [worker.load for worker in known]
        tokens = _sums(
            self._grown(
                ("worker", worker.incarnation),
                (worker.load.generated_tokens, worker.load.prompt_tokens, worker.load.cached_tokens),
            )
            for worker in known
        ) or (0, 0, 0)
        shares: dict[str, float | None] = {}
        for name in LATENCIES:
            histograms = {address: getattr(info, name) for address, info in infos.items()}
            counts = _sums(
                self._grown((name, address), tuple(latencies.cumulative))
                for address, latencies in histograms.items()
            )
            bounds = next((tuple(latencies.bounds_seconds) for latencies in histograms.values()), ())
            for percent in (50, 99):
                shares[f"{name}_p{percent}"] = quantile(bounds, counts, percent / 100)
        if self._looked_at is not None and at_seconds > self._looked_at:
            generated, prompt, cached = tokens
            point = Point(
                at_seconds=at_seconds,
                tokens_per_second=generated / (at_seconds - self._looked_at),
                hit_rate=cached / prompt if prompt else None,
                waiting=sum(load.waiting for load in loads)
                + sum(info.requests_waiting for info in infos.values()),
                **shares,
            )
            self._points.append(point)
        self._looked_at = at_seconds

    def _grown(self, source: tuple[str, ...], now: tuple[int, ...]) -> tuple[int, ...]:
        before = self._counters.pop(source, now)
        self._counters[source] = now
        while len(self._counters) > MAX_SOURCES:
            del self._counters[next(iter(self._counters))]
        is_reset = len(before) != len(now) or any(
            later < earlier for later, earlier in zip(now, before, strict=True)
        )
        if is_reset:
            return now
        return tuple(later - earlier for later, earlier in zip(now, before, strict=True))

    def as_dict(self, now_seconds: float) -> dict[str, Any]:
        """Return the points as a list for each value, oldest first, with ages instead of times."""
        points = [point for point in self._points if now_seconds - point.at_seconds <= WINDOW_SECONDS]
        rows = [asdict(point) for point in points]
        series = {
            field.name: [row[field.name] for row in rows]
            for field in fields(Point)
            if field.name != "at_seconds"
        }
        ages = [round(now_seconds - point.at_seconds, 1) for point in points]
        return {"window_seconds": WINDOW_SECONDS, "age_seconds": ages, **series}


def _sums(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Add tuples element by element. Skip those of another length than the first, which are of another version."""
    known = list(counts)
    return tuple(sum(column) for column in zip(*(c for c in known if len(c) == len(known[0])), strict=True))


def quantile(bounds: tuple[float, ...], cumulative: tuple[int, ...], share: float) -> float | None:
    """Return a histogram's quantile, interpolated linearly within a bucket as Prometheus does.

    It is at most the last bound. None if nothing was counted, or the counts do not match the bounds.
    """
    if len(cumulative) != len(bounds) + 1 or not cumulative[-1]:
        return None
    rank = share * cumulative[-1]
    lower_bound, lower_count = 0.0, 0
    for bound, count in zip(bounds, cumulative, strict=False):
        if count >= rank and count > lower_count:
            return lower_bound + (bound - lower_bound) * (rank - lower_count) / (count - lower_count)
        lower_bound, lower_count = bound, count
    return bounds[-1]
