"""Times of workers in a trace: phases stay within their attempt, in order and near the truth, on any network."""

from itertools import accumulate, pairwise
from math import inf, nan

import pytest
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.bookings import Placed
from blockyard.router.generation.request_trace import MAX_PHASES, PHASES, AttemptTrace
from hypothesis import given
from hypothesis import strategies as st

from .prompt import Clock

DECODE = session_pb2.PHASE_KIND_DECODE
SECONDS = st.floats(0, 100)
WAYS = st.floats(0.001, 2)


def attempt(clock: Clock) -> AttemptTrace:
    return AttemptTrace(
        placing_at=clock.now,
        placed=Placed(address="a", names=[], prompt_tokens=1, uncached_tokens=1, blocks=1),
        worker_id="w",
        incarnation="w-1",
        sent_at=clock.now,
        pull=None,
        clock=clock,
        tokens_before=0,
    )


def phase(kind: int, began: float, ended: float) -> session_pb2.Phase:
    return session_pb2.Phase(kind=kind, began_seconds=began, ended_seconds=ended)  # type: ignore[arg-type]


@given(
    WAYS,
    st.lists(st.tuples(st.sampled_from(sorted(PHASES)), SECONDS, WAYS), min_size=1, max_size=8),
    st.sampled_from(["finished", "lost", "stopped"]),
    st.integers(0, 3),
)
def test_phases_stay_within_the_attempt_in_order_and_near_the_truth(way_there, parts, end, num_tokens):
    clock = Clock()
    trace = attempt(clock)
    times = list(pairwise(accumulate((seconds for _, seconds, _ in parts), initial=0.0)))
    reached, least_way_back = trace.sent_at + way_there, inf
    for (kind, _, way_back), (began, ended) in zip(parts, times, strict=True):
        # No message overtakes an earlier one.
        clock.now = max(clock.now, reached + ended + way_back)
        least_way_back = min(least_way_back, clock.now - reached - ended)
        trace.hear(phase(kind, began, ended))
    trace.over(clock.now, end, num_tokens)
    spans = trace.spans()
    for (kind, *_), (began, _), span in zip(parts, times, spans, strict=False):
        assert span.name == PHASES[kind]
        assert trace.sent_at <= span.began_at <= span.ended_at <= trace.ended_at
        assert abs(span.began_at - (reached + began)) <= (way_there + least_way_back) / 2 + 1e-9
    assert all(before.began_at <= after.began_at for before, after in pairwise(spans))


@pytest.mark.parametrize(
    "hostile",
    [
        phase(DECODE, -1.0, 1.0),
        phase(DECODE, 2.0, 1.0),
        phase(DECODE, 0.0, 1e9),
        phase(DECODE, nan, nan),
        phase(DECODE, 0.0, inf),
        phase(99, 0.0, 1.0),
    ],
)
def test_a_phase_that_cannot_be_is_left_out(hostile: session_pb2.Phase) -> None:
    clock = Clock()
    trace = attempt(clock)
    clock.now += 10.0
    trace.hear(hostile)
    trace.over(clock.now, "finished", 1)
    assert trace.spans() == []


def test_an_attempt_keeps_a_bounded_number_of_phases() -> None:
    clock = Clock()
    trace = attempt(clock)
    clock.now += 10.0
    for _ in range(2 * MAX_PHASES):
        trace.hear(phase(DECODE, 0.0, 1.0))
    trace.over(clock.now, "finished", 1)
    assert len(trace.spans()) == MAX_PHASES


def test_a_decode_that_the_worker_could_not_report_lasts_to_the_attempts_end() -> None:
    clock = Clock()
    trace = attempt(clock)
    clock.now += 2.0
    trace.hear(phase(session_pb2.PHASE_KIND_PREFILL, 0.0, 2.0))
    clock.now += 3.0
    trace.over(clock.now, "lost", 7)
    assert [(span.name, span.ended_at - trace.sent_at) for span in trace.spans()] == [
        ("prefill", 2.0),
        ("decode", 5.0),
    ]
