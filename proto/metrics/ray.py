"""The exporter for Ray (`ray.util.metrics`), for an actor.

Only the two actor.py import this, as only they know Ray. Ray serves the metrics at each node's metrics port, as
`ray_blockyard_...`. Does not own what is read.

A histogram is exported as three gauges. Ray's own histogram takes 5 us a value and makes up its sum. Ray's counters
begin with the first event, so buckets without events would be missing and quantiles wrong. The rules in
deploy/grafana/prometheus.yaml give all of them the names that they have without Ray.
"""

import asyncio
import logging
from collections.abc import Callable

from blockyard.proto.metrics.prometheus import bounds
from blockyard.proto.metrics.readings import Distribution, Kind, Metric, Reading, Readings, Source, numbers
from ray.util.metrics import Counter, Gauge

logger = logging.getLogger(__name__)

REPORT_SECONDS = 2.0
RECORDS_PER_TICK = 20
"""Values exported before other tasks get the event loop. Each takes about 5 us."""


class RayExport:
    """Exports the readings of one worker or router to Ray. Ray forgets a gauge that is not set again.

    It omits vLLM's names: Ray's metrics pass through OpenTelemetry, which takes no colon.
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
        self._exported: dict[tuple[str, str], float] = {}
        """The value of each counter last exported, by name and value of its label."""

    async def report(self, readings: Readings) -> None:
        """Export all readings, RECORDS_PER_TICK in each turn of the event loop."""
        num_records = 0
        for metric in self._table:
            # A router has none before its first look.
            for name, value, number in _series(metric, readings[metric.name]) if readings else ():
                num_records += self._record(metric, name, value, number)
                if num_records >= RECORDS_PER_TICK:
                    num_records = 0
                    await asyncio.sleep(0)

    def _record(self, metric: Metric, name: str, value: str, number: float) -> bool:
        """Export one series, and return whether there was anything to export."""
        label = metric.label or "le"
        tags = {**self._own, label: value} if value else self._own
        if metric.kind is not Kind.COUNTER:
            self._gauges[name].set(number, tags)
            return True
        added = number - self._exported.get((name, value), 0.0)
        if added <= 0:
            return False
        self._exported[name, value] = number
        self._counters[name].inc(added, tags)
        return True


async def keep_reporting(source: Source, read: Callable[[], Readings]) -> None:
    """Export readings every REPORT_SECONDS until cancelled. An exception ends the export and is logged, and the process
    goes on."""
    try:
        export = RayExport(source)
        while True:
            await export.report(read())
            await asyncio.sleep(REPORT_SECONDS)
    except Exception:
        logger.exception("stopped reporting metrics to Ray")


def _own_labels(metric: Metric) -> tuple[str, ...]:
    return (metric.label,) if metric.label else ()


def _gauge_names(metric: Metric) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names of Ray's gauges for a metric, each with its labels. A counter has none."""
    match metric.kind:
        case Kind.COUNTER:
            return []
        case Kind.GAUGE:
            return [(metric.full_name, _own_labels(metric))]
        case Kind.HISTOGRAM:
            bucket, total, count = metric.series
            return [(bucket, ("le",)), (total, ()), (count, ())]


def _series(metric: Metric, reading: Reading) -> list[tuple[str, str, float]]:
    """Return (name, value of its label, number) of each series."""
    if not isinstance(reading, Distribution):
        return [(metric.full_name, value, number) for value, number in numbers(metric, reading)]
    bucket, total, count = metric.series
    buckets = zip(bounds(metric), reading.cumulative, strict=True)
    return [
        *((bucket, bound, float(number)) for bound, number in buckets),
        (total, "", reading.sum),
        (count, "", float(reading.count)),
    ]
