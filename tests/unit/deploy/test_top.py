"""`blockyard top`: rates between two looks, and a screen that fits."""

import json
from collections.abc import Callable
from math import isfinite

import pytest
from blockyard.deploy.views.top import (
    SPARKS,
    Look,
    as_document,
    bar,
    rows_of,
    screen,
    sparkline,
    total_rate,
    totals_of,
)
from blockyard.proto.v1 import cluster_pb2
from hypothesis import given
from hypothesis import strategies as st

from .rig import printed


def worker(name: str = "worker-0", model: str = "", role: str = "", **load: int) -> cluster_pb2.Worker:
    return cluster_pb2.Worker(
        worker_id=name,
        incarnation=name,
        model=model,
        role=role,
        state=cluster_pb2.WORKER_STATE_READY,
        total_blocks=100,
        load=cluster_pb2.WorkerLoad(**load),
        index=cluster_pb2.WorkerIndex(lag_seconds=0.25),
    )


def look(at_seconds: float, *workers: cluster_pb2.Worker, models: tuple[str, ...] = ()) -> Look:
    info = cluster_pb2.ClusterInfo(cluster="trial", requests_running=3, requests_waiting=2)
    info.model.id = models[0] if models else ""
    for model in models:
        info.models.add(id=model)
    return Look(at_seconds=at_seconds, info=info, workers=workers)


def shown(now: Look, before: Look | None = None, *, columns: int = 80, trouble: str = "") -> str:
    rows, totals = rows_of(now, before), totals_of(now, before)
    rates = [0.0, total_rate(rows)]
    return printed(screen(now, rows, rates, columns=columns, trouble=trouble, totals=totals), width=columns)


def test_the_screen_shows_a_line_a_worker_and_below_what_is_wrong(snapshot: Callable[[str], None]) -> None:
    busy = worker(running=256, waiting=64, used_blocks=99, preemptions=1234, prompt_tokens=9, cached_tokens=9)
    of_ranks = worker("worker-1")
    of_ranks.num_ranks = 2
    before = look(1.0, worker(pulled_blocks=10, lent_blocks=5))
    now = look(3.0, worker(pulled_blocks=110, lent_blocks=5, generated_tokens=14))
    roles = look(1.0, worker("a", role="prefill"), worker("b", role="decode"))
    trouble = "no router answers at 127.0.0.1:1"
    texts = [
        shown(look(1.0, busy, of_ranks), trouble=trouble),
        *(shown(now, before, columns=columns) for columns in (80, 120)),
        *(shown(seen, columns=120) for seen in (look(1.0, worker()), roles, *several_models()[:1])),
        shown(*reversed(several_models())),
    ]
    snapshot("\n".join(texts))


def several_models() -> tuple[Look, Look]:
    """Return two looks at a cluster of two models, the earlier one first."""
    before = [
        worker("b-0", "second", generated_tokens=10, prompt_tokens=100),
        worker("a-0", "first", generated_tokens=5),
    ]
    busy = {
        "running": 1,
        "used_blocks": 50,
        "generated_tokens": 30,
        "prompt_tokens": 200,
        "cached_tokens": 50,
    }
    now = [
        worker("b-0", "second", **busy),
        worker("a-0", "first", running=2, generated_tokens=25),
        worker("a-1", "first", running=3, used_blocks=100, generated_tokens=999),
    ]
    models = ("first", "second")
    return look(1.0, *before, models=models), look(3.0, *now, models=models)


def test_of_several_models_each_has_a_row_of_totals() -> None:
    before, now = several_models()
    first, second = totals = totals_of(now, before)
    assert (first.model, first.running, first.kv_usage) == ("first", 5, 0.5)
    assert first.generated_tokens_per_second == 10.0
    assert (second.model, second.state, second.hit_rate) == ("second", "1 of 1", 0.5)
    document = json.loads(json.dumps(as_document(now, rows_of(now, before), totals)))
    assert [(one["model"], one["running"]) for one in document["models"]] == [("first", 5), ("second", 1)]
    assert [one["model"] for one in document["workers"]] == ["second", "first", "first"]
    assert (document["cluster"], document["requests_running"]) == ("trial", 3)
    assert document["workers"][0]["worker"] == "b-0"
    one_model = look(1.0, worker())
    assert totals_of(one_model, None) == []
    assert as_document(one_model, rows_of(one_model, None))["workers"][0]["ranks"] in (0, 1)


def test_rates_are_what_came_between_two_looks_and_at_the_first_the_hit_rate_is_since_the_start() -> None:
    before = look(10.0, worker(prompt_tokens=100, cached_tokens=100, generated_tokens=50))
    now = look(
        12.0,
        worker(
            prompt_tokens=300,
            cached_tokens=150,
            generated_tokens=70,
            used_blocks=25,
            pulled_blocks=100,
            pulling_bytes=7,
            failed_pulls=2,
        ),
    )
    (row,) = rows_of(now, before)
    assert (row.prompt_tokens_per_second, row.generated_tokens_per_second) == (100.0, 10.0)
    assert (row.hit_rate, row.kv_usage, row.index_lag_seconds) == (0.25, 0.25, 0.25)
    assert (row.pulled_blocks_per_second, row.lent_blocks_per_second) == (50.0, 0.0)
    assert (row.pulling_bytes, row.lending_bytes, row.failed_pulls) == (7, 0, 2)
    assert total_rate([row, row]) == 20.0
    (first,) = rows_of(now, None)
    assert (first.prompt_tokens_per_second, first.generated_tokens_per_second) == (0.0, 0.0)
    assert first.hit_rate == 0.5
    assert [row.hit_rate for row in rows_of(look(1.0, worker()), None)] == [None]


@pytest.mark.parametrize(
    "back",
    [
        {"generated_tokens": 18},
        {"prompt_tokens": 18},
        {"cached_tokens": 18},
        {"incarnation": "b", "generated_tokens": 1009, "prompt_tokens": 1009},
    ],
)
def test_a_restart_or_counters_that_go_back_give_no_negative_rate(back: dict[str, int]) -> None:
    counted = {"generated_tokens": 1000, "prompt_tokens": 1000, "cached_tokens": 500}
    later = worker(**(counted | {name: value for name, value in back.items() if name != "incarnation"}))
    later.incarnation = str(back.get("incarnation", "worker-0"))
    (row,) = rows_of(look(2.0, later), look(1.0, worker(**counted)))
    assert (row.generated_tokens_per_second, row.prompt_tokens_per_second) == (0.0, 0.0)
    assert row.hit_rate is None or row.hit_rate >= 0.0


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_the_screen_keeps_to_its_columns_and_a_line_a_worker(columns: int) -> None:
    load = {"running": 256, "waiting": 64, "generated_tokens": 10**9, "pulled_blocks": 10**6}
    workers = [worker(f"worker-with-a-long-name-{number}", **load) for number in range(5)]
    workers[0].state, workers[0].state_reason = cluster_pb2.WORKER_STATE_REFUSED, "another model " * 5
    seen = look(1.0, *workers)
    rates = [float(number) for number in range(60)]
    text = printed(screen(seen, rows_of(seen, None), rates, columns=columns), width=columns)
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) == 4 + len(workers)


@pytest.mark.parametrize(
    ("rates", "columns", "line"),
    [([], 9, ""), ([0.0, 0.0], 9, "▁▁"), ([0.0, 7.0, 3.5], 9, "▁█▄"), ([9.0, 0.0, 1.0], 2, "▁█")],
)
def test_the_sparkline_is_of_the_last_looks_against_their_largest(
    rates: list[float], columns: int, line: str
) -> None:
    assert sparkline(rates, columns) == line


@given(st.lists(st.floats() | st.integers(-1000, 1000), max_size=70), st.integers(1, 80))
def test_a_sparkline_has_a_cell_for_each_of_the_last_numbers_whatever_they_are(
    rates: list[float], columns: int
) -> None:
    line = sparkline(rates, columns)
    assert len(line) == min(len(rates), columns)
    assert set(line) <= set(SPARKS)
    assert sparkline([rate if isfinite(rate) and rate > 0 else 0.0 for rate in rates], columns) == line


@pytest.mark.parametrize(("share", "cells"), [(-1.0, "░░░░"), (0.0, "░░░░"), (0.5, "██░░"), (2.0, "████")])
def test_a_bar_is_as_long_as_its_share(share: float, cells: str) -> None:
    assert bar(share, 4) == cells
