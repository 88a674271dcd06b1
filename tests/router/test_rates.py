"""A measured rate counts while it is fresh, and no worker stays slow because it was slow once."""

from math import inf, nan

import pytest
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.view import ClusterView
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.policies import PlacementRequest
from blockyard.router.placement.rates import LEAST_TOKENS_PER_SECOND, faded, is_measured, typical
from hypothesis import given
from hypothesis import strategies as st

from .candidates import chosen
from .prompt import Clock
from .test_cluster_view import view_of

HALF_LIFE = PlacementConfig().rate_half_life_seconds
MEASURED = st.floats(LEAST_TOKENS_PER_SECOND, 1e9)
AGES = st.floats(0, 1e6)


@given(own=MEASURED, usual=MEASURED, ages=st.tuples(AGES, AGES).map(sorted), half_life=st.floats(0.1, 1e4))
def test_a_rate_rises_from_its_own_to_the_usual_and_never_falls_or_goes_beyond(
    own: float, usual: float, ages: list[float], half_life: float
) -> None:
    earlier, later = (faded(own, usual, age_seconds=age, half_life_seconds=half_life) for age in ages)
    assert own * (1 - 1e-9) <= earlier <= later * (1 + 1e-9) <= max(own, usual) * (1 + 1e-8)


def test_a_rate_is_whole_for_a_half_life_and_then_goes_half_the_way_in_each() -> None:
    believed = [
        faded(100.0, 10_000.0, age_seconds=age * 30.0, half_life_seconds=30.0) for age in (0, 1, 2, 3, 1000)
    ]
    assert believed == pytest.approx([100.0, 100.0, 1000.0, 10_000.0 / 10**0.5, 10_000.0])
    assert faded(100.0, 10_000.0, age_seconds=1e9, half_life_seconds=0.0) == 100.0


@pytest.mark.parametrize("nothing", [0.0, -1.0, nan, inf])
def test_what_is_no_rate_stays_none_and_pulls_nobody(nothing: float) -> None:
    assert not is_measured(faded(nothing, 50.0, age_seconds=1e9, half_life_seconds=1.0))
    assert faded(50.0, nothing, age_seconds=1e9, half_life_seconds=1.0) == 50.0
    assert typical([nothing, 50.0, nothing]) == 50.0
    assert typical([nothing]) == 0.0


def rates(view: ClusterView) -> dict[str, tuple[float, float]]:
    return {
        c.worker_id: (c.prefill_tokens_per_second, c.decode_tokens_per_second)
        for c in view.candidates([], 100, {})
    }


def report(view: ClusterView, name: str, rate: float, *, done: int = 0) -> None:
    view.heard(
        name,
        cluster_pb2.WorkerLoad(
            prefill_tokens_per_second=rate,
            decode_tokens_per_second=rate / 10,
            prompt_tokens=done,
            generated_tokens=done,
        ),
    )


def pass_time(view: ClusterView, clock: Clock, seconds: float, said: dict[str, float]) -> None:
    """Advance the clock. Each worker repeats its report without a new measurement."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        for name, rate in said.items():
            report(view, name, rate)


def test_who_was_slow_once_is_placed_on_again_although_it_says_what_it_said_then() -> None:
    view, clock = view_of("a", "b", "c")
    said = {"a": 1000.0, "b": 1000.0, "c": 10.0}
    for name, rate in said.items():
        report(view, name, rate)
    assert rates(view)["c"] == (10.0, 1.0)
    pass_time(view, clock, HALF_LIFE - 1, said)
    assert rates(view)["c"] == (10.0, 1.0)
    # Others have a queue of 50 ms: by its old word the slow one would take 10 seconds.
    queues = {"a": 50, "b": 50, "c": 0}
    seen: dict[str, float] = {}
    for half_lives in (0, 9):
        pass_time(view, clock, half_lives * HALF_LIFE, said)
        workers = [
            c._replace(queued_prefill_tokens=queues[c.worker_id]) for c in view.candidates([], 100, {})
        ]
        seen[chosen(PlacementRequest(prompt_tokens=100), *workers)] = clock.now
    assert list(seen)[-1] == "c"
    assert set(seen) != {"c"}
    assert rates(view)["c"] == (pytest.approx(1000.0, rel=0.05), pytest.approx(100.0, rel=0.05))


def test_who_measures_slow_again_and_again_is_believed() -> None:
    view, clock = view_of("a", "b", "c")
    for second in range(5 * int(HALF_LIFE)):
        clock.now += 1.0
        for name, rate in (("a", 1000.0), ("b", 1000.0), ("c", 10.0)):
            report(view, name, rate + second % 2)
    prefill, decode = rates(view)["c"]
    assert prefill <= 11.0
    assert decode <= 1.1


def test_work_that_measures_nothing_renews_no_rate() -> None:
    view, clock = view_of("a", "b", "c")
    for second in range(20 * int(HALF_LIFE)):
        clock.now += 1.0
        for name, rate in (("a", 1000.0), ("b", 1000.0), ("c", 10.0)):
            report(view, name, rate, done=second)
    assert rates(view)["c"] == (pytest.approx(1000.0, rel=0.05), pytest.approx(100.0, rel=0.05))


def test_a_fast_worker_stays_fast_among_slow_ones_however_long_nothing_is_measured() -> None:
    view, clock = view_of("a", "b", "c")
    said = {"a": 10_000.0, "b": 100.0, "c": 100.0}
    pass_time(view, clock, 20 * HALF_LIFE, said)
    assert rates(view)["a"] == (10_000.0, 1000.0)


def test_a_life_that_comes_back_keeps_the_age_of_its_rates() -> None:
    view, clock = view_of("a", "b", "c")
    said = {"a": 1000.0, "b": 1000.0, "c": 10.0}
    for _ in range(20):
        pass_time(view, clock, HALF_LIFE, said)
        worker = view.at("c")
        assert worker is not None
        assert worker.hello is not None
        worker.hello.load.prefill_tokens_per_second, worker.hello.load.decode_tokens_per_second = 10.0, 1.0
        view.disconnected("c", "cut")
        view.accepted("c", worker.hello)
    assert rates(view)["c"] == (pytest.approx(1000.0, rel=0.05), pytest.approx(100.0, rel=0.05))


def test_a_new_life_is_believed_at_its_first_word() -> None:
    view, clock = view_of("a", "b")
    report(view, "a", 1000.0)
    report(view, "b", 10.0)
    pass_time(view, clock, 20 * HALF_LIFE, {"a": 1000.0, "b": 10.0})
    assert rates(view)["b"][0] > 400.0
    worker = view.at("b")
    assert worker is not None
    assert worker.hello is not None
    hello = session_pb2.Hello()
    hello.CopyFrom(worker.hello)
    hello.incarnation, hello.load.prefill_tokens_per_second = "another", 10.0
    view.accepted("b", hello)
    assert rates(view)["b"][0] == 10.0
