"""The exporter for Prometheus: an HTTP endpoint, for a process outside Ray.

Owns how readings become series, how many clients may scrape at once, and for how long. Does not own what is read.
Anyone who reaches the port may read the metrics.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread, Timer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from blockyard.proto.limits import MAX_PORT
from blockyard.proto.metrics.readings import (
    Distribution,
    Kind,
    LabelledReadings,
    Metric,
    Reading,
    Source,
    numbers,
)
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_SCRAPES = 16
"""Connections at once, each of which has a thread. Further ones are closed at once."""
SCRAPE_SECONDS = 10.0
"""The longest time that a connection stays open."""


_Readings = Sequence[tuple[Mapping[str, str], Reading]]
"""Readings of one metric, each with its own labels."""


class ReadingsCollector(Collector):
    """Takes new readings at each scrape, on the thread of the scraper's connection."""

    def __init__(self, source: Source, read: Callable[[], LabelledReadings]) -> None:
        self._source = source
        self._read = read

    def collect(self) -> Iterator[Family]:
        found = self._read()
        for metric in self._source.table:
            # A router has none before its first look. What is the whole router's has readings once.
            readings = [(labels, one[metric.name]) for labels, one in found if metric.name in one]
            if readings:
                yield from self._families(metric, readings)

    def _families(self, metric: Metric, readings: _Readings) -> Iterator[Family]:
        """Yield the metric under its own name, and under each of vLLM's names if those are wanted."""
        yield self._family(metric, readings, metric.full_name, metric.label)
        for name in metric.vllm if self._source.names == "vllm" else ():
            yield self._family(metric, readings, name, metric.vllm_label)

    def _family(self, metric: Metric, readings: _Readings, name: str, label: str) -> Family:
        labels = [*self._source.labels, *((label,) if label else ())]
        if metric.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(name, metric.meaning, labels=labels)
            for own, reading in readings:
                assert isinstance(reading, Distribution)
                buckets = list(zip(bounds(metric), reading.cumulative, strict=True))
                histogram.add_metric(self._values(own), buckets=buckets, sum_value=reading.sum)
            return histogram
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(name, metric.meaning, labels=labels)
        for own, reading in readings:
            for value, number in numbers(metric, reading):
                family.add_metric([*self._values(own), *((value,) if label else ())], number)
        return family

    def _values(self, own: Mapping[str, str]) -> list[str]:
        return list({**self._source.labels, **own}.values())


def bounds(metric: Metric) -> list[str]:
    """Return the upper bounds of a histogram's buckets as values of the label `le`, the last of them +Inf."""
    return [*map(str, metric.buckets), "+Inf"]


def exposition(source: Source, readings: LabelledReadings) -> bytes:
    """Return the readings as Prometheus' text, of the type CONTENT_TYPE."""
    registry = CollectorRegistry()
    registry.register(ReadingsCollector(source, lambda: readings))
    return generate_latest(registry)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because a line would quote the client."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._permits = BoundedSemaphore(MAX_SCRAPES)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._permits.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        timer = Timer(SCRAPE_SECONDS, _hang_up, (request,))
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._permits.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a connection: a client that disconnects is no defect."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def metrics_endpoint(
    host: str, port: int, source: Source, read: Callable[[], LabelledReadings]
) -> Iterator[str]:
    """Serve metrics at the yielded URL until the context ends. Port 0 takes a free one. Raises OSError for a taken
    port, ValueError for an invalid one."""
    if not 0 <= port <= MAX_PORT:
        raise ValueError(f"the port of the metrics must be from 0 to {MAX_PORT}, not {port}")
    registry = CollectorRegistry()
    registry.register(ReadingsCollector(source, read))
    # An IPv6 address is in brackets, as gRPC takes it.
    address = host.removeprefix("[").removesuffix("]")
    server = (_Server6 if ":" in address else _Server)((address, port), _Handler)
    server.set_app(make_wsgi_app(registry))
    thread = Thread(target=server.serve_forever, daemon=True, name="metrics")
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
