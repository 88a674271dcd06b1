"""Workers are compared at equal work: equal machines are believed equal, and slow ones slow while they prove it."""

from math import exp, inf, log, nan
from random import Random

import pytest
from blockyard.proto.step_costs import StepWork
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.cluster.view import ClusterView
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.policies import PlacementRequest
from blockyard.router.placement.rates import ClusterSpeeds, WorkerSpeed, faded, is_measured, shrunk
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.proto.machine import Machine

from .candidates import chosen, hello_of, view_of
from .prompt import Clock

HALF_LIFE = PlacementConfig().rate_half_life_seconds
DIFFERENCES = st.floats(-5, 5)
AGES = st.floats(0, 1e6)
MIXES = ("chat", "small", "long", "decode")
MIX = st.sampled_from(MIXES)


class Reporter:
    """Reports the sum of the work that a machine has done: mostly of one kind, and a little of all kinds."""

    def __init__(self, mix: str, *, slowness: float = 1.0, noise: float = 0.05) -> None:
        self.mix, self.slowness = mix, slowness
        self._machine = Machine(noise=noise)
        self._total = StepWork()

    def work(self, chance: Random, mix: str | None = None) -> cluster_pb2.WorkerLoad:
        if mix is None:
            mix = self.mix if chance.random() < 0.7 else chance.choice(MIXES)
        self._total = self._total.plus(self._machine.row(mix, chance, slowness=self.slowness))
        return load_of(self._total)


def load_of(work: StepWork) -> cluster_pb2.WorkerLoad:
    seconds, steps, prompt_steps, *counts = work
    names = ("prompt_tokens", "excess_tokens", "decodes", "context_tokens", "pairs")
    return cluster_pb2.WorkerLoad(
        step_seconds=seconds,
        steps=int(steps),
        prompt_steps=int(prompt_steps),
        **{f"step_{name}": int(count) for name, count in zip(names, counts, strict=True)},
    )


def believed(reporters: list[Reporter], *, num_rows: int, seed: int = 0) -> list[float]:
    """Return each worker's trusted slowness beside the median, after a trial and rows of its own work."""
    chance, cluster = Random(seed), ClusterSpeeds(half_life_seconds=HALF_LIFE)
    speeds = [WorkerSpeed() for _ in reporters]
    return run(cluster, speeds, reporters, chance, num_rows=num_rows)


def run(
    cluster: ClusterSpeeds,
    speeds: list[WorkerSpeed],
    reporters: list[Reporter],
    chance: Random,
    **when: float,
) -> list[float]:
    for number in range(int(when["num_rows"])):
        now = when.get("start", 0.0) + 0.1 * number
        for speed, reporter in zip(speeds, reporters, strict=True):
            mix = "trial" if speed.num_rows == 0 else None
            cluster.report(speed, reporter.work(chance, mix), now)
            now += 0.1 / len(speeds)
        cluster.refresh(speeds, now)
    return [speed.relative for speed in speeds]


@examples(10)
@given(st.lists(MIX, min_size=3, max_size=6), st.integers(0, 1000))
def test_equal_machines_are_believed_equal_whatever_their_work(mixes: list[str], seed: int) -> None:
    found = believed([Reporter(mix) for mix in mixes], num_rows=40, seed=seed)
    assert found == pytest.approx([1.0] * len(mixes), rel=0.03)


@examples(10)
@given(
    st.sampled_from([0.25, 0.5, 2.0, 4.0]), MIX, st.lists(MIX, min_size=3, max_size=5), st.integers(0, 1000)
)
def test_a_machine_of_another_speed_is_believed_so_whatever_its_work(slowness, own, others, seed):
    reporters = [Reporter(own, slowness=slowness), *map(Reporter, others)]
    first, *rest = believed(reporters, num_rows=60, seed=seed)
    assert 0.5 <= log(first) / log(slowness) <= 1.1
    assert rest == pytest.approx([1.0] * len(rest), rel=0.15)


@examples(10)
@given(MIX, st.lists(MIX, min_size=3, max_size=5), st.integers(0, 1000))
def test_a_machine_that_becomes_slow_and_recovers_is_believed_after_some_rows(own, others, seed) -> None:
    reporters = [Reporter(own), *map(Reporter, others)]
    chance, cluster = Random(seed), ClusterSpeeds(half_life_seconds=HALF_LIFE)
    speeds = [WorkerSpeed() for _ in reporters]
    found = []
    for slowness, num_rows, start in ((1.0, 40, 0.0), (3.0, 12, 10.0), (3.0, 24, 20.0), (1.0, 50, 30.0)):
        reporters[0].slowness = slowness
        found.append(run(cluster, speeds, reporters, chance, num_rows=num_rows, start=start)[0])
    assert found[1] > 1.5
    assert found[2] == pytest.approx(3.0, rel=0.25)
    assert found[3] == pytest.approx(1.0, rel=0.08)


ANY_LOAD = st.builds(
    cluster_pb2.WorkerLoad,
    step_seconds=st.floats(),
    steps=st.integers(0, 2**64 - 1),
    step_prompt_tokens=st.integers(0, 2**64 - 1),
    step_decodes=st.integers(0, 2**64 - 1),
    step_pairs=st.integers(0, 2**64 - 1),
)


@examples(30)
@given(st.lists(ANY_LOAD, max_size=20))
def test_no_report_makes_a_speed_that_is_no_number(loads: list[cluster_pb2.WorkerLoad]) -> None:
    cluster, speeds = ClusterSpeeds(half_life_seconds=HALF_LIFE), [WorkerSpeed(), WorkerSpeed()]
    for number, load in enumerate(loads):
        cluster.report(speeds[number % 2], load, float(number))
        cluster.refresh(speeds, float(number))
        assert all(0 < speed.slowness < inf and 0 < speed.relative < inf for speed in speeds)


@given(DIFFERENCES, st.integers(0, 100), st.integers(0, 100))
def test_more_rows_are_trusted_more_and_nothing_beyond_what_was_measured(difference, rows, more):
    few, many = shrunk(difference, rows), shrunk(difference, rows + more)
    assert abs(few) <= abs(many) <= abs(difference)
    assert few * difference >= 0


def test_a_small_difference_is_chance_and_a_large_one_is_real() -> None:
    assert exp(shrunk(log(1.06), 1000)) == pytest.approx(1.0, abs=0.01)
    assert exp(shrunk(log(2.0), 1000)) == pytest.approx(2.0, rel=0.06)
    assert exp(shrunk(log(4.0), 1000)) == pytest.approx(4.0, rel=0.04)


@given(own=DIFFERENCES, ages=st.tuples(AGES, AGES).map(sorted), half_life=st.floats(0.1, 1e4))
def test_a_slowness_fades_and_never_rises_or_turns(own: float, ages: list[float], half_life: float) -> None:
    earlier, later = (faded(own, age_seconds=age, half_life_seconds=half_life) for age in ages)
    if own > 0:
        assert 0 <= later <= earlier <= own
    else:
        assert earlier == later == own


def test_a_slowness_is_whole_for_a_half_life_and_then_goes_half_the_way_in_each() -> None:
    found = [faded(8.0, age_seconds=age * 30.0, half_life_seconds=30.0) for age in (0, 1, 2, 3, 1e9)]
    assert found == pytest.approx([8.0, 8.0, 4.0, 2.0, 0.0])
    assert faded(8.0, age_seconds=1e9, half_life_seconds=0.0) == 8.0


@pytest.mark.parametrize("nothing", [0.0, -1.0, nan, inf])
def test_what_is_no_rate_is_not_measured(nothing: float) -> None:
    assert not is_measured(nothing)
    assert is_measured(1.0)


def rates(view: ClusterView) -> dict[str, float]:
    return {c.worker_id: c.prefill_tokens_per_second for c in view.candidates([], 100, {})}


def work(view: ClusterView, clock: Clock, reporters: dict[str, Reporter], num_rows: int) -> None:
    """Let the workers compute. Each reports each row."""
    chance = Random(0)
    for _ in range(num_rows):
        clock.now += 0.1
        for name, reporter in reporters.items():
            view.heard(name, reporter.work(chance))


def pass_time(view: ClusterView, clock: Clock, seconds: float) -> None:
    """Advance the clock. Each worker repeats its report without more work."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        for worker in view.workers():
            view.heard(worker.address, worker.load)


def three(slowness: float = 10.0) -> tuple[ClusterView, Clock]:
    """A view of workers a, b and c that have computed. c is slower than the others."""
    view, clock = view_of("a", "b", "c")
    work(
        view,
        clock,
        {"a": Reporter("chat"), "b": Reporter("small"), "c": Reporter("chat", slowness=slowness)},
        40,
    )
    return view, clock


def test_nothing_is_measured_until_a_worker_reports_steps() -> None:
    view, _ = view_of("a", "b")
    assert set(rates(view).values()) == {0.0}
    assert {c.decode_step_ms for c in view.candidates([], 100, {})} == {0.0}


def test_who_was_slow_once_is_placed_on_again_although_it_says_what_it_said_then() -> None:
    view, clock = three()
    assert rates(view)["c"] < 0.15 * rates(view)["a"]
    pass_time(view, clock, HALF_LIFE - 1)
    assert rates(view)["c"] < 0.15 * rates(view)["a"]
    # Others have a queue of about 0.1 s: the slow one would take longer, by its old word.
    queues = {"a": 5_000, "b": 5_000, "c": 1_000}
    seen: dict[str, float] = {}
    for half_lives in (0, 9):
        pass_time(view, clock, half_lives * HALF_LIFE)
        workers = [
            c._replace(queued_prefill_tokens=queues[c.worker_id]) for c in view.candidates([], 1000, {})
        ]
        seen[chosen(PlacementRequest(prompt_tokens=1000), *workers)] = clock.now
    assert list(seen)[-1] == "c"
    assert set(seen) != {"c"}
    assert rates(view)["c"] == pytest.approx(rates(view)["a"], rel=0.05)


def test_a_fast_worker_stays_fast_among_slow_ones_however_long_nothing_is_measured() -> None:
    view, clock = three(slowness=0.1)
    fast = rates(view)["c"]
    assert fast > 6 * rates(view)["a"]
    pass_time(view, clock, 20 * HALF_LIFE)
    assert rates(view)["c"] == pytest.approx(fast)


def test_a_life_that_comes_back_keeps_the_age_of_its_speed_and_a_new_life_is_not_held_to_it() -> None:
    view, clock = three()
    worker = view.at("c")
    assert worker is not None
    for _ in range(20):
        pass_time(view, clock, HALF_LIFE)
        assert worker.hello is not None
        worker.hello.load.CopyFrom(worker.load)
        view.disconnected("c", "cut")
        view.accepted("c", worker.hello)
    assert rates(view)["c"] == pytest.approx(rates(view)["a"], rel=0.05)
    view, clock = three()
    view.accepted("c", hello_of("c", incarnation="another"))
    work(view, clock, {name: Reporter("chat") for name in "abc"}, 20)
    assert rates(view)["c"] == pytest.approx(rates(view)["a"], rel=0.1)
