"""The second way out: `ray.util.metrics`, for an actor.

Only the two actor.py import this, as only they know Ray. Ray serves what it is told at each node's metrics port, as
`ray_blockyard_...`. A histogram leaves as three gauges of ours: Ray's own takes 5 us a value and makes up its sum, and
its counters begin with the first event, so that buckets without any would be missing and quantiles be wrong.
deploy/grafana/prometheus.yaml gives all of them the names that they have without Ray. Does not own what is read.
"""

import asyncio
import logging
from collections.abc import Callable

from blockyard.proto.metrics.prometheus import bounds
from blockyard.proto.metrics.readings import Distribution, Kind, Metric, Reading, Readings, Source, numbers
from ray.util.metrics import Counter, Gauge

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
RECORDS_A_TURN = 20
"""Each takes some 5 us of the event loop."""


class RayExport:
    """Tells Ray of one worker or router. Ray forgets a gauge that is not set again.

    It has no names of vLLM: Ray's metrics pass through OpenTelemetry, which takes no colon.
    """

    def __init__(self, source: Source) -> None:
        self._own = dict(source.labels)
        self._table = table = source.table
        self._gauges = {
            name: Gauge(name, metric.meaning, (*self._own, *labels))
            for metric in table
            for name, labels in _gauge_names(metric)
        }
        self._counters = {
            metric.full_name: Counter(metric.full_name, metric.meaning, (*self._own, *_own_labels(metric)))
            for metric in table
            if metric.kind is Kind.COUNTER
        }
        self._told: dict[tuple[str, str], float] = {}
        """What Ray was told of each counter, by name and value of its label."""

    async def report(self, readings: Readings) -> None:
        """Of all metrics that were read, a few in one turn of the event loop."""
        num_records = 0
        for metric in self._table:
            # A router has none before its first look.
            for name, value, number in _series(metric, readings[metric.name]) if readings else ():
                num_records += self._record(metric, name, value, number)
                if num_records >= RECORDS_A_TURN:
                    num_records = 0
                    await asyncio.sleep(0)

    def _record(self, metric: Metric, name: str, value: str, number: float) -> bool:
        """Whether there was anything to tell."""
        label = metric.label or "le"
        tags = {**self._own, label: value} if value else self._own
        if metric.kind is not Kind.COUNTER:
            self._gauges[name].set(number, tags)
            return True
        added = number - self._told.get((name, value), 0.0)
        if added <= 0:
            return False
        self._told[name, value] = number
        self._counters[name].inc(added, tags)
        return True


async def keep_reporting(source: Source, read: Callable[[], Readings]) -> None:
    """Until cancelled. A defect in it costs the metrics, not the service."""
    try:
        export = RayExport(source)
        while True:
            await export.report(read())
            await asyncio.sleep(REPORT_SECONDS)
    except Exception:
        logger.exception("metrics are reported no more")


def _own_labels(metric: Metric) -> tuple[str, ...]:
    return (metric.label,) if metric.label else ()


def _gauge_names(metric: Metric) -> list[tuple[str, tuple[str, ...]]]:
    """Ray's gauges of a metric and their labels."""
    match metric.kind:
        case Kind.COUNTER:
            return []
        case Kind.GAUGE:
            return [(metric.full_name, _own_labels(metric))]
        case Kind.HISTOGRAM:
            bucket, total, count = metric.series
            return [(bucket, ("le",)), (total, ()), (count, ())]


def _series(metric: Metric, reading: Reading) -> list[tuple[str, str, float]]:
    """(name, value of its label, number)"""
    if not isinstance(reading, Distribution):
        return [(metric.full_name, value, number) for value, number in numbers(metric, reading)]
    bucket, total, count = metric.series
    buckets = zip(bounds(metric), reading.cumulative, strict=True)
    return [
        *((bucket, bound, float(number)) for bound, number in buckets),
        (total, "", reading.sum),
        (count, "", float(reading.count)),
    ]
