"""Messages that wait for a router are merged and bounded, and carry the newest state."""

from typing import Any

import pytest
from blockyard.proto.naming.marks import MAX_MARKS_BYTES
from blockyard.proto.v1 import session_pb2
from blockyard.proto.v1.session_pb2 import RejectReason, StepOutput
from blockyard.worker.engine_types import EngineLoad, SequenceOutput
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.phases import Phase, PhaseKind
from blockyard.worker.sequences.sequence import FinishReason, SequenceState, TokenLogprob
from blockyard.worker.session.outbox import MAX_LOGPROBS_A_MESSAGE, MAX_PHASES, Outbox

IDLE = EngineLoad(**dict.fromkeys(EngineLoad.__dataclass_fields__, 0))


def output(
    token: int | None, offset: int, finish: FinishReason | None = None, **changes: Any
) -> SequenceOutput:
    running = SequenceState.FAILED if token is None else SequenceState.RUNNING
    return SequenceOutput(
        request_id=RequestId(0),
        token_offset=offset,
        cached_tokens=16,
        state=SequenceState.FINISHED if finish else running,
        finish_reason=finish,
        **({"token_ids": () if token is None else (token,)} | changes),
    )


def steps(outbox: Outbox) -> list[StepOutput]:
    """Take what waits. Nothing is left then."""
    messages = outbox.take(IDLE)
    assert outbox.take(IDLE) == []
    return [message.step for message in messages]


def test_steps_that_were_not_taken_become_one_row_a_sequence() -> None:
    outbox = Outbox()
    for number in range(500):
        outbox.add(1, output(number, number))
        outbox.add(2, output(1000 + number, 7 + number, FinishReason.LENGTH if number == 499 else None))
    (step,) = steps(outbox)
    assert list(step.handles) == [1, 2]
    assert list(step.token_offsets) == [0, 7]
    assert list(step.token_counts) == [500, 500]
    assert list(step.token_ids) == [*range(500), *range(1000, 1500)]
    assert list(step.finish_reasons) == [0, 2]
    assert not step.indexes, "each request has one output"
    assert not step.details


def test_only_the_newest_ping_is_answered_and_the_load_is_said_once_for_each_change() -> None:
    outbox = Outbox()
    assert len(outbox.take(IDLE)) == 1
    assert outbox.take(IDLE) == []
    for nonce in range(2000):
        outbox.answer_ping(nonce, IDLE)
    assert [message.pong.nonce for message in outbox.take(IDLE)] == [1999]


def test_requests_that_end_without_an_answer_say_why() -> None:
    outbox = Outbox()
    outbox.add(1, output(None, 3))
    outbox.add(2, output(None, 0, expired=True))
    outbox.reject(3, RejectReason.REJECT_REASON_BUSY)
    rejected, step = outbox.take(IDLE)
    assert (rejected.rejected.handle, rejected.rejected.reason) == (3, RejectReason.REJECT_REASON_BUSY)
    assert dict(zip(step.step.failed_handles, step.step.failed_reasons, strict=True)) == {
        1: RejectReason.REJECT_REASON_INTERNAL,
        2: RejectReason.REJECT_REASON_DEADLINE,
    }


def test_outputs_of_one_request_have_rows_of_their_own() -> None:
    outbox = Outbox()
    for number in range(3):
        for index in (0, 2):
            outbox.add(1, output(10 * index + number, number, index=index))
        outbox.add(7, output(99, number))
    (step,) = steps(outbox)
    assert list(step.handles) == [1, 1, 7]
    assert list(step.indexes) == [0, 2, 0]
    assert list(step.token_ids) == [0, 1, 2, 20, 21, 22, 99, 99, 99]


def test_logprobs_are_merged_with_their_tokens() -> None:
    outbox = Outbox()
    prompt = (TokenLogprob(3, -1.5, 2), TokenLogprob(4, -0.5, 1))
    outbox.add(6, output(1, 0))
    for number in range(3):
        logprob = TokenLogprob(50 + number, -float(number), 1 + number, ((7, -0.25),))
        first = {"prompt_logprobs": prompt} if number == 0 else {}
        outbox.add(5, output(50 + number, number, logprobs=(logprob,), **first))
    (step,) = steps(outbox)
    (details,) = step.details
    assert step.handles[details.row] == 5
    found = [(each.token_id, each.logprob, each.rank) for each in details.logprobs]
    assert found == [(50, 0, 1), (51, -1, 2), (52, -2, 3)]
    assert [(top.token_id, top.logprob) for top in details.logprobs[0].top] == [(7, -0.25)]
    assert [(each.token_id, each.rank) for each in details.prompt_logprobs] == [(3, 2), (4, 1)]
    assert not details.HasField("beam_score")


def test_a_beam_brings_all_its_tokens_and_its_score_even_where_that_is_0() -> None:
    outbox = Outbox()
    for index, score in enumerate((0.0, -2.0)):
        scores = {"cumulative_logprob": 3 * score, "beam_score": score}
        tokens = {"token_ids": (4, 5, 6), "stop_token": 6}
        outbox.add(1, output(0, 0, FinishReason.STOP, index=index, **tokens, **scores))
    (step,) = steps(outbox)
    assert list(step.token_counts) == [3, 3]
    assert list(step.stop_tokens) == [7, 7]
    found = [(d.row, d.beam_score, d.cumulative_logprob) for d in step.details]
    assert found == [(0, 0.0, 0.0), (1, -2.0, -6.0)]


def test_embeddings_are_rows_without_tokens_that_end_and_large_ones_go_in_several_messages() -> None:
    outbox = Outbox()
    for handle in range(400):
        outbox.add(handle, output(None, 0, FinishReason.STOP, embedding=handle.to_bytes(2) * 2**15))
    messages = steps(outbox)
    assert [handle for step in messages for handle in step.handles] == list(range(400))
    assert max(step.ByteSize() for step in messages) < 8 * 2**20
    first = messages[0]
    assert (first.token_counts[1], first.finish_reasons[1], len(first.failed_handles)) == (0, 1, 0)
    assert first.details[1].embedding == b"\0\1" * 2**15


def test_many_logprobs_go_in_several_messages_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_LOGPROBS_A_MESSAGE > 1000
    monkeypatch.setattr("blockyard.worker.session.outbox.MAX_LOGPROBS_A_MESSAGE", 1000)
    outbox = Outbox()
    for handle in range(5):
        outbox.add(handle, output(7, 0, prompt_logprobs=(TokenLogprob(1, -1.0, 1),) * 499))
    outbox.add(9, output(None, 0))
    found = [
        (list(step.handles), [detail.row for detail in step.details], list(step.failed_handles))
        for step in steps(outbox)
    ]
    assert found == [([0, 1], [0, 1], []), ([2, 3], [0, 1], []), ([4], [0], [9])]


def test_what_is_given_back_comes_behind_its_tokens_and_a_drain_before_all() -> None:
    outbox = Outbox()
    outbox.add(1, output(5, 0))
    outbox.fail(1, RejectReason.REJECT_REASON_DRAINING)
    outbox.reject(2, RejectReason.REJECT_REASON_DRAINING)
    outbox.tell_draining(True)
    draining, rejected, step = outbox.take(IDLE)
    assert draining.draining.is_draining
    assert rejected.rejected.handle == 2
    assert (list(step.step.token_ids), list(step.step.failed_handles)) == ([5], [1])
    assert list(step.step.failed_reasons) == [RejectReason.REJECT_REASON_DRAINING]
    assert outbox.take(IDLE) == []


def test_a_withdrawn_mark_that_arrives_again_stays_and_one_withdrawn_last_goes() -> None:
    outbox = Outbox()
    first, second = b"a" * 8, b"b" * 8
    outbox.tell_withdrawal(first)
    outbox.tell_arrival(first + second)
    outbox.tell_withdrawal(second)
    (step,) = steps(outbox)
    assert (step.arrived_marks, step.withdrawn_marks) == (first + second, second)
    for number in range(MAX_MARKS_BYTES // 8 + 5):
        outbox.tell_withdrawal(number.to_bytes(8))
    (step,) = steps(outbox)
    assert len(step.withdrawn_marks) == MAX_MARKS_BYTES


def test_marks_of_arrivals_are_told_once_and_a_slow_router_gets_the_last() -> None:
    outbox = Outbox()
    outbox.tell_arrival(b"a" * 8)
    outbox.tell_arrival(b"b" * 8)
    (step,) = steps(outbox)
    assert step.arrived_marks == b"a" * 8 + b"b" * 8
    for _ in range(MAX_MARKS_BYTES // 256 + 1):
        outbox.tell_arrival(b"c" * 256)
    outbox.tell_arrival(b"d" * 8)
    (step,) = steps(outbox)
    assert len(step.arrived_marks) == MAX_MARKS_BYTES
    assert step.arrived_marks.endswith(b"c" * 8 + b"d" * 8)


def test_each_load_comes_with_the_last_request_that_it_counts() -> None:
    outbox = Outbox()
    outbox.last_handle = 3
    outbox.answer_ping(1, IDLE)
    outbox.last_handle = 4
    outbox.add(3, output(5, 0))
    pong, step = outbox.take(IDLE)
    assert (pong.pong.last_handle, step.step.last_handle) == (3, 4)


def test_phases_go_out_once_before_the_rows_and_a_slow_router_hears_of_the_last_ones() -> None:
    outbox = Outbox()
    for kind in PhaseKind:
        outbox.report_phase(3, Phase(kind, 0.5, 1.5, 2, 4))
    (step,) = steps(outbox)
    assert [phase.handle for phase in step.phases] == [3] * len(PhaseKind)
    names = [session_pb2.PhaseKind.Name(phase.kind) for phase in step.phases]
    assert names == [f"PHASE_KIND_{kind.name}" for kind in PhaseKind]
    assert set(names) == set(session_pb2.PhaseKind.keys()) - {"PHASE_KIND_UNSPECIFIED"}
    for number in range(2 * MAX_PHASES):
        outbox.report_phase(number, Phase(PhaseKind.QUEUE, 0.0, 1.0, 0, 0))
    (step,) = steps(outbox)
    assert [phase.handle for phase in step.phases] == list(range(MAX_PHASES, 2 * MAX_PHASES))
