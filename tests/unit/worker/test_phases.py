"""Phases of watched requests: they follow one another without a gap, from the arrival to the end."""

from itertools import pairwise

import pytest
from blockyard.worker.engine import Engine
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.phases import Phase, PhaseKind
from hypothesis import given
from hypothesis import strategies as st

from .engines import make_engine, request

PREEMPTED = {PhaseKind.PREEMPTED, PhaseKind.SWAPPED}


def phases_of(engine: Engine) -> dict[RequestId, list[Phase]]:
    found: dict[RequestId, list[Phase]] = {}
    while engine.has_work:
        for request_id, phase in engine.step().phases:
            found.setdefault(request_id, []).append(phase)
    return found


def test_a_request_waits_computes_its_prompt_and_decodes() -> None:
    engine = make_engine()
    engine.watch(engine.submit(request(20, max_tokens=5)), seconds_here=0.25)
    (phases,) = phases_of(engine).values()
    assert [(phase.kind, phase.steps, phase.tokens) for phase in phases] == [
        (PhaseKind.QUEUE, 0, 0),
        (PhaseKind.PREFILL, 1, 1),
        (PhaseKind.DECODE, 4, 4),
    ]
    assert [phase.began_seconds for phase in phases] == pytest.approx([0.0, 0.25, 0.37])
    assert phases[-1].ended_seconds == pytest.approx(0.77)


def test_a_prefill_counts_its_chunks() -> None:
    engine = make_engine(config={"max_num_batched_tokens": 64, "max_num_seqs": 8})
    engine.watch(engine.submit(request(200, max_tokens=1)), seconds_here=0.0)
    (phases,) = phases_of(engine).values()
    assert [(phase.kind, phase.steps, phase.tokens) for phase in phases] == [
        (PhaseKind.QUEUE, 0, 0),
        (PhaseKind.PREFILL, 4, 1),
    ]


def test_nothing_is_reported_of_a_request_that_nobody_watches_or_that_was_cancelled() -> None:
    engine = make_engine()
    engine.submit(request(20))
    cancelled = engine.submit(request(30))
    engine.watch(cancelled, seconds_here=0.0)
    engine.cancel(cancelled)
    assert phases_of(engine) == {}


def test_a_request_that_expires_in_the_queue_has_waited() -> None:
    engine = make_engine(config={"max_num_seqs": 1})
    engine.submit(request(20, max_tokens=50))
    engine.watch(engine.submit(request(30, deadline=0.5)), seconds_here=0.0)
    (phases,) = phases_of(engine).values()
    assert [phase.kind for phase in phases] == [PhaseKind.QUEUE]
    assert phases[0].ended_seconds >= 0.5


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8),
    st.sampled_from(["swap", "recompute"]),
    st.sampled_from([16, 64]),
)
def test_phases_follow_one_another_without_a_gap(
    wanted: list[tuple[int, int]], preemption: str, batched_tokens: int
) -> None:
    config = {
        "max_model_len": 128,
        "max_num_batched_tokens": batched_tokens,
        "max_num_seqs": 8,
        "preemption": preemption,
        "swap_blocks": 16,
    }
    engine = make_engine(num_blocks=8, config=config)
    lengths = {}
    for number, (length, max_tokens) in enumerate(wanted):
        request_id = engine.submit(request(length, max_tokens=max_tokens, token=number))
        engine.watch(request_id, seconds_here=1.0)
        lengths[request_id] = max_tokens
    found = phases_of(engine)
    assert found.keys() == lengths.keys()
    for request_id, phases in found.items():
        assert phases[0].began_seconds == 0.0
        assert phases[0].ended_seconds >= 1.0
        assert all(before.ended_seconds == after.began_seconds for before, after in pairwise(phases))
        assert all(phase.began_seconds <= phase.ended_seconds for phase in phases)
        assert sum(phase.tokens for phase in phases) == lengths[request_id]
        kinds = [phase.kind for phase in phases]
        assert kinds[:2] == [PhaseKind.QUEUE, PhaseKind.PREFILL]
        for before, after in pairwise(kinds):
            assert (after is PhaseKind.PREFILL) == (before in PREEMPTED | {PhaseKind.QUEUE})
            assert before is not PhaseKind.DECODE or after in PREEMPTED
    preempted = sum(phase.kind in PREEMPTED for phases in found.values() for phase in phases)
    assert preempted == engine.scheduler.num_preemptions
