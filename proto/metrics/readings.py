"""The types of metrics and their readings, which workers, routers and both exporters share.

Pure. Owns the shape of metrics and histograms. Does not own which metrics there are (table.py) or how they leave the
process (prometheus.py, ray.py).
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Literal

PREFIX = "blockyard_"
MetricNames = Literal["blockyard", "vllm"]
"""The names at Prometheus endpoints: ours alone, or vLLM's as well."""


class Kind(Enum):
    COUNTER = "counter"
    """Only grows, and begins at 0 with its process."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table. Raises ValueError for a row that contradicts itself."""

    name: str
    """Without the prefix, and without the `_total` of a counter."""
    kind: Kind
    unit: str
    meaning: str
    vllm: tuple[str, ...] = ()
    """vLLM's names of the same metric, without the `_total` of a counter. No two metrics of ours share one of them."""
    vllm_label: str = ""
    """vLLM's name of the label."""
    label: str = ""
    """The one label besides those of every series, or none."""
    values: tuple[str, ...] = ()
    """All values of the label. So no metric grows with what clients send."""
    most_values: int = 0
    """The most values that the label has, if they are known only at run time."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, each inclusive. One more bucket takes all greater values."""

    def __post_init__(self) -> None:
        if bool(self.label) != (bool(self.values) != bool(self.most_values)):
            raise ValueError(f"{self.name}: a label needs its values or their number, and they need a label")
        if bool(self.buckets) != (self.kind is Kind.HISTOGRAM):
            raise ValueError(f"{self.name}: buckets are for histograms")
        if self.label and self.kind is Kind.HISTOGRAM:
            raise ValueError(f"{self.name}: a histogram has no label of its own")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"{self.name}: buckets must grow")

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names of the metric's series in Prometheus."""
        match self.kind:
            case Kind.COUNTER:
                return (f"{self.full_name}_total",)
            case Kind.GAUGE:
                return (self.full_name,)
            case Kind.HISTOGRAM:
                return tuple(f"{self.full_name}_{part}" for part in ("bucket", "sum", "count"))


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram at one moment."""

    cumulative: tuple[int, ...]
    """Numbers of values at or below each bound. The last one counts all values."""
    sum: float

    @property
    def count(self) -> int:
        return self.cumulative[-1]


class Histogram:
    """Counts values by bucket and adds them up, in 0.14 us each. In the same loop prometheus_client's histogram took
    0.74 us and Ray's 5 us."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.buckets
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0

    @property
    def bounds(self) -> tuple[float, ...]:
        return self._bounds

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> Distribution:
        return Distribution(tuple(accumulate(self._counts)), self._sum)


Reading = float | Mapping[str, float] | Distribution
"""A number, one number for each value of the label (missing ones are 0), or a histogram."""
Readings = Mapping[str, Reading]
"""Readings by a metric's name. Counters are totals since the process began."""


MODEL_LABEL = "model_name"
LabelledReadings = Sequence[tuple[Mapping[str, str], Readings]]
"""Readings of each model of one process, with the labels that differ from those of the Source."""


def of_one_model(read: Callable[[], Readings]) -> Callable[[], LabelledReadings]:
    """Return the readings of a process whose series all have the labels of its Source."""
    return lambda: (({}, read()),)


def numbers(metric: Metric, reading: Reading) -> list[tuple[str, float]]:
    """Return (value of its label, number) of a counter or gauge, in the table's order. Raises ValueError for an unknown
    value of the label, for too many values, or for a reading of another kind."""
    if isinstance(reading, Distribution):
        raise ValueError(f"{metric.name} is no histogram")
    if not isinstance(reading, Mapping):
        if metric.label:
            raise ValueError(f"{metric.name} needs a number for each {metric.label}")
        return [("", float(reading))]
    if metric.most_values:
        if len(reading) > metric.most_values:
            raise ValueError(
                f"{metric.name} has at most {metric.most_values} of {metric.label}, not {len(reading)}"
            )
        return [(value, float(number)) for value, number in reading.items()]
    if unknown := sorted(set(reading) - set(metric.values)):
        raise ValueError(f"{metric.name} has no {metric.label} {', '.join(unknown)}")
    return [(value, float(reading.get(value, 0.0))) for value in metric.values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One process that exports metrics: its metrics, and the labels of all its series."""

    table: Sequence[Metric]
    labels: Mapping[str, str]
    names: MetricNames = "blockyard"


def labels_of(kind: Literal["worker", "router"], name: str, *, cluster: str, model: str) -> dict[str, str]:
    """Return the labels of all series of a process. Cluster and model keep the clusters of one Prometheus apart."""
    return {kind: name, "cluster": cluster, MODEL_LABEL: model}


def by_name(table: Sequence[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in table}
