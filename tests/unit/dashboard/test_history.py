"""The live page's charts: rates, points, quantiles and how much is kept."""

import pytest
from blockyard.deploy.dashboard.history import MAX_POINTS, WINDOW_SECONDS, History, quantile
from blockyard.deploy.dashboard.last_seen import MIN_RATE_SECONDS, RATE_WINDOW_SECONDS, Rates
from blockyard.proto.v1 import cluster_pb2
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.tuples(st.floats(0.5, 40.0), st.integers(0, 1000), st.booleans()), min_size=1))
def test_a_rate_is_the_growth_of_one_life_in_the_last_minute(steps: list[tuple[float, int, bool]]) -> None:
    rates, now, life, count = Rates(), 0.0, 0, 0
    seen: list[tuple[float, int]] = []
    for pause, growth, is_new_life in steps:
        now += pause
        if is_new_life:
            life, count, seen = life + 1, 0, []
        count += growth
        seen = [(at, known) for at, known in seen if now - at <= RATE_WINDOW_SECONDS] + [(now, count)]
        found = rates.per_minute(now, {("w", life): {"evictions": count}})
        since, first = seen[0]
        expected = (
            {"evictions": 60 * (count - first) / (now - since)} if now - since >= MIN_RATE_SECONDS else {}
        )
        assert found == {("w", life): expected}
    # A router that began anew under its old address: its counter fell.
    assert rates.per_minute(now + 10.0, {("w", life): {"evictions": count - 1}}) == {("w", life): {}}


def info_of(*first_token: int, waiting: int = 0) -> cluster_pb2.ClusterInfo:
    latencies = cluster_pb2.Latencies(bounds_seconds=[1.0, 2.0], cumulative=first_token)
    return cluster_pb2.ClusterInfo(requests_waiting=waiting, first_token=latencies)


def worker_of(incarnation: str, generated: int, prompt: int = 0, cached: int = 0) -> cluster_pb2.Worker:
    load = cluster_pb2.WorkerLoad(
        generated_tokens=generated, prompt_tokens=prompt, cached_tokens=cached, waiting=2
    )
    return cluster_pb2.Worker(worker_id="w", incarnation=incarnation, load=load)


def test_a_point_is_what_grew_since_the_look_before_over_all_workers_and_routers() -> None:
    history = History()
    history.look(0.0, {"a": info_of(5, 5, 5), "b": info_of(0, 0, 0)}, [worker_of("one", 1000, 100, 100)])
    assert history.as_dict(0.0)["age_seconds"] == []
    history.look(
        10.0, {"a": info_of(6, 9, 9, waiting=3), "b": info_of(0, 0, 0)}, [worker_of("one", 1050, 200, 125)]
    )
    assert history.as_dict(11.0) == {
        "window_seconds": WINDOW_SECONDS,
        "age_seconds": [1.0],
        "tokens_per_second": [5.0],
        "hit_rate": [0.25],
        "waiting": [5],
        "first_token_p50": [pytest.approx(4 / 3)],
        "first_token_p99": [pytest.approx(1 + (0.99 * 4 - 1) / 3)],
        "inter_token_p50": [None],
        "inter_token_p99": [None],
    }


def test_neither_a_new_life_nor_a_restarted_router_is_a_jump_in_a_chart() -> None:
    history = History()
    history.look(0.0, {"a": info_of(50, 50, 50)}, [worker_of("one", 1000)])
    history.look(10.0, {"a": info_of(1, 1, 1)}, [worker_of("two", 700)])
    history.look(20.0, {}, [])
    history.look(30.0, {"a": info_of(1, 1, 1)}, [worker_of("two", 720)])
    found = history.as_dict(30.0)
    assert found["tokens_per_second"] == [0.0, 0.0, 2.0]
    assert found["first_token_p50"] == [0.5, None, None]


@given(st.lists(st.tuples(st.floats(0.1, 1000), st.integers(0, 10**9)), max_size=300))
def test_the_history_is_bounded_in_points_and_in_time(looks: list[tuple[float, int]]) -> None:
    history, now = History(), 0.0
    for seconds, tokens in looks:
        now += seconds
        history.look(now, {}, [worker_of("one", tokens)])
    found = history.as_dict(now)
    assert len(found["age_seconds"]) <= MAX_POINTS
    assert all(0 <= age <= WINDOW_SECONDS for age in found["age_seconds"])
    assert all(rate >= 0 for rate in found["tokens_per_second"])


@given(st.lists(st.integers(0, 100), min_size=3, max_size=3), st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_that_has_its_rank(counts: list[int], share: float) -> None:
    cumulative = (counts[0], counts[0] + counts[1], sum(counts))
    found = quantile((1.0, 2.0), cumulative, share)
    if not sum(counts):
        assert found is None
        return
    assert found is not None
    rank = share * sum(counts)
    assert 0 <= found <= 2
    if rank > cumulative[0]:
        assert found >= 1
    if 0 < rank <= cumulative[0]:
        assert found <= 1
