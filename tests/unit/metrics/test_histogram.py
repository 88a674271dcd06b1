"""A histogram counts as Prometheus' own client library does."""

from blockyard.proto.metrics.readings import Histogram, Kind, Metric
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

METRIC = Metric(name="x", kind=Kind.HISTOGRAM, unit="seconds", meaning="x", buckets=(0.1, 0.5, 1.0, 10.0))


@given(st.lists(st.sampled_from((0.0, 0.1, 0.5, 10.0)) | st.floats(0, 100)))
def test_buckets_count_and_sum_equal_those_of_the_client_library(values: list[float]) -> None:
    registry = CollectorRegistry()
    ours, reference = Histogram(METRIC), Reference("x", "x", buckets=METRIC.buckets, registry=registry)
    for value in values:
        ours.observe(value)
        reference.observe(value)
    read = ours.read()
    bounds = [*map(str, METRIC.buckets), "+Inf"]
    assert read.cumulative == tuple(registry.get_sample_value("x_bucket", {"le": le}) for le in bounds)
    assert (read.sum, read.count) == (registry.get_sample_value("x_sum"), len(values))


def test_what_was_read_stays_as_it_was() -> None:
    histogram = Histogram(METRIC)
    read = histogram.read()
    histogram.observe(0.2)
    assert (read.count, histogram.read().count) == (0, 1)
