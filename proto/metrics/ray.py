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
from blockyard.proto.metrics.readings import (
    MODEL_LABEL,
    Distribution,
    Kind,
    LabelledReadings,
    Metric,
    Reading,
    Source,
    numbers,
)
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
        self._exported: dict[tuple[str, str, str], float] = {}
        """The value of each counter last exported, by name, model and value of its label."""

    async def report(self, readings: LabelledReadings) -> None:
        """Export all readings, RECORDS_PER_TICK in each turn of the event loop."""
        num_records = 0
        for labels, of_model in readings:
            tags = {**self._own, **labels}
            for metric in self._table:
                # A router has none before its first look. What is the whole router's has readings once.
                reading = of_model.get(metric.name)
                for name, value, number in () if reading is None else _series(metric, reading):
                    num_records += self._record(metric, name, value, number, tags)
                    if num_records >= RECORDS_PER_TICK:
                        num_records = 0
                        await asyncio.sleep(0)

    def _record(self, metric: Metric, name: str, value: str, number: float, tags: dict[str, str]) -> bool:
        """Export one series, and return whether there was anything to export."""
        key = name, tags[MODEL_LABEL], value
        if value:
            tags = {**tags, metric.label or "le": value}
        if metric.kind is not Kind.COUNTER:
            self._gauges[name].set(number, tags)
            return True
        added = increase(self._exported.get(key, 0.0), number)
        self._exported[key] = number
        if not added:
            return False
        self._counters[name].inc(added, tags)
        return True


def increase(exported: float, number: float) -> float:
    """Return what a counter has grown by. One that is lower than before belongs to a model that was added again, and
    counts from 0."""
    return number - exported if number >= exported else number


async def keep_reporting(source: Source, read: Callable[[], LabelledReadings]) -> None:
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
