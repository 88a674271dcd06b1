"""The table of metrics is complete: every reading is in it, labels are bounded, and all errors are listed."""

import re
from collections.abc import Iterator

import pytest
from blockyard.proto.metrics.ray import increase
from blockyard.proto.metrics.readings import Distribution, Histogram, Kind, Metric, Readings, numbers
from blockyard.proto.metrics.table import (
    METRICS,
    OTHER_TENANTS,
    OUTCOMES,
    ROUTER_METRICS,
    WORKER_METRICS,
    WORKER_STATES,
)
from blockyard.proto.v1.cluster_pb2 import WorkerIndex
from blockyard.router.cluster.worker_view import WorkerState
from blockyard.router.errors import RouterError
from blockyard.router.generation.metrics import CANCELLED, OK
from blockyard.router.openai.http.errors import HttpRefusal
from blockyard.worker.engine_types import EngineLoad
from blockyard.worker.metrics import worker_readings
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from tests.unit.router.rig import running_router, until

MOST_SERIES, MOST_SERIES_WITH_VLLMS = 360, 510
"""Bounds on the series of one router: its use does not add to them."""


def subclasses(kind: type[RouterError]) -> Iterator[type[RouterError]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def check(table: tuple[Metric, ...], readings: Readings) -> None:
    assert set(readings) == {metric.name for metric in table}
    for metric in table:
        reading = readings[metric.name]
        if metric.kind is Kind.HISTOGRAM:
            assert isinstance(reading, Distribution)
            assert len(reading.cumulative) == len(metric.buckets) + 1
        else:
            assert [value for value, _ in numbers(metric, reading)] == list(
                metric.values or ((OTHER_TENANTS,) if metric.most_values else ("",))
            )


def test_names_are_prometheus_names_and_stand_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    # The ending belongs to what Prometheus makes of a counter or histogram.
    assert not any(name.endswith(("_total", "_bucket", "_sum", "_count")) for name in names)


def test_a_name_of_vllm_has_one_metric_so_that_routers_and_workers_do_not_add_up() -> None:
    names = [name for metric in METRICS for name in metric.vllm]
    assert len(names) == len(set(names))
    assert all(bool(metric.vllm_label) == bool(metric.vllm and metric.label) for metric in METRICS)


def test_every_error_and_every_state_of_a_worker_is_a_value_of_its_label() -> None:
    kinds = [kind for kind in subclasses(RouterError) if not issubclass(kind, HttpRefusal)]
    reasons = {kind.reason for kind in kinds if "reason" in vars(kind)}
    assert set(OUTCOMES) == reasons | {OK, CANCELLED}
    assert {state.name.lower() for state in WorkerState} == set(WORKER_STATES)


def num_series(metric: Metric) -> int:
    """Under one name."""
    return len(metric.buckets) + 3 if metric.buckets else metric.most_values or len(metric.values) or 1


def test_a_router_has_a_bounded_number_of_series() -> None:
    assert sum(map(num_series, ROUTER_METRICS)) < MOST_SERIES
    with_vllms = sum(num_series(metric) * (1 + len(metric.vllm)) for metric in ROUTER_METRICS)
    assert MOST_SERIES < with_vllms < MOST_SERIES_WITH_VLLMS


def test_a_worker_reads_exactly_what_stands_in_its_table() -> None:
    load = EngineLoad(**dict.fromkeys(EngineLoad.__dataclass_fields__, 1))  # type: ignore[arg-type]
    for index in (None, WorkerIndex(state=2, lag_seconds=0.5)):
        readings = worker_readings(load, index, num_evictions=4, stalled_seconds=0.0, is_draining=True)
        check(WORKER_METRICS, readings)
        assert readings["kv_usage_ratio"] == pytest.approx(1 / 3)
        assert (readings["evictions"], readings["draining"]) == (4, 1)


async def test_a_router_reads_exactly_what_stands_in_its_table() -> None:
    async with running_router() as router:
        await until(lambda: router.server.readings)
        check(ROUTER_METRICS, router.server.readings)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kind": Kind.COUNTER, "label": "reason"}, "needs its values"),
        ({"kind": Kind.COUNTER, "most_values": 3}, "need a label"),
        (
            {"kind": Kind.COUNTER, "label": "a", "values": ("b",), "most_values": 3},
            "its values or their number",
        ),
        ({"kind": Kind.GAUGE, "buckets": (1.0,)}, "buckets are for histograms"),
        ({"kind": Kind.HISTOGRAM}, "buckets are for histograms"),
        ({"kind": Kind.HISTOGRAM, "buckets": (2.0, 1.0)}, "must grow"),
        ({"kind": Kind.HISTOGRAM, "buckets": (1.0,), "label": "a", "values": ("b",)}, "no label of its own"),
    ],
)
def test_a_metric_that_contradicts_itself_is_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Metric(name="x", unit="y", meaning="z", **fields)  # type: ignore[arg-type]


def test_a_label_that_the_table_does_not_have_is_refused() -> None:
    metric = next(metric for metric in METRICS if metric.name == "requests")
    with pytest.raises(ValueError, match="has no outcome a-clients-own-text"):
        numbers(metric, {"a-clients-own-text": 1})


def test_more_values_than_a_label_may_have_are_refused() -> None:
    metric = next(metric for metric in METRICS if metric.name == "tenant_requests")
    assert numbers(metric, {"a": 1, "b": 2}) == [("a", 1.0), ("b", 2.0)]
    with pytest.raises(ValueError, match="at most 32 of tenant, not 33"):
        numbers(metric, {str(number): 1 for number in range(33)})


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


@pytest.mark.parametrize(
    ("exported", "number", "added"), [(0, 5, 5), (5, 7, 2), (5, 5, 0), (5, 2, 2), (5, 0, 0)]
)
def test_a_counter_that_began_anew_goes_on_from_its_exported_value(
    exported: float, number: float, added: float
) -> None:
    """A model that was removed and added again counts from 0."""
    assert increase(exported, number) == added
