"""The first way out: an HTTP endpoint that Prometheus scrapes, for a process that Ray knows nothing of.

Owns how readings become series. Does not own what is read, nor by whom it may be seen: whoever reaches the port may.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from blockyard.proto.metrics import Distribution, Kind, Metric, Reading, Readings, numbers
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

MAX_PORT = 65535


class ReadingsCollector(Collector):
    """Reads when scraped, on the endpoint's thread. `identity` is the label that says whose they are, and its value."""

    def __init__(
        self, table: Sequence[Metric], identity: tuple[str, str], read: Callable[[], Readings]
    ) -> None:
        self._table = table
        self._label, self._name = identity
        self._read = read

    def collect(self) -> Iterator[Family]:
        readings = self._read()
        for metric in self._table:
            # A router has none before its first look.
            if metric.name in readings:
                yield self._family(metric, readings[metric.name])

    def _family(self, metric: Metric, reading: Reading) -> Family:
        labels = [self._label, *((metric.label,) if metric.label else ())]
        if metric.kind is Kind.HISTOGRAM:
            assert isinstance(reading, Distribution)
            histogram = HistogramMetricFamily(metric.full_name, metric.meaning, labels=labels)
            buckets = list(zip(bounds(metric), reading.cumulative, strict=True))
            histogram.add_metric([self._name], buckets=buckets, sum_value=reading.sum)
            return histogram
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(metric.full_name, metric.meaning, labels=labels)
        for value, number in numbers(metric, reading):
            family.add_metric([self._name, *((value,) if metric.label else ())], number)
        return family


def bounds(metric: Metric) -> list[str]:
    """A histogram's values of `le`, the last of them +Inf."""
    return [*map(str, metric.buckets), "+Inf"]


@contextmanager
def metrics_endpoint(
    host: str, port: int, table: Sequence[Metric], identity: tuple[str, str], read: Callable[[], Readings]
) -> Iterator[str]:
    """Serves at the URL for the life of the context; port 0 takes a free one. Raises OSError for a taken port,
    ValueError for one that is none."""
    if not 0 <= port <= MAX_PORT:
        raise ValueError(f"the port of the metrics must be from 0 to {MAX_PORT}, not {port}")
    registry = CollectorRegistry()
    registry.register(ReadingsCollector(table, identity, read))
    # An IPv6 address is in brackets, as gRPC takes it.
    address = host.removeprefix("[").removesuffix("]")
    server, thread = start_http_server(port, addr=address, registry=registry)
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
