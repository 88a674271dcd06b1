"""What waits for a router is merged, bounded, and says the newest."""

from blockyard.proto.v1.session_pb2 import RejectReason
from blockyard.worker.engine import EngineLoad, SequenceOutput
from blockyard.worker.outbox import Outbox
from blockyard.worker.sequence import FinishReason, SequenceId, SequenceState

IDLE = EngineLoad(**dict.fromkeys(EngineLoad.__dataclass_fields__, 0))


def output(
    token: int | None, offset: int, finish: FinishReason | None = None, **changes: bool
) -> SequenceOutput:
    state = (
        SequenceState.FINISHED
        if finish
        else SequenceState.RUNNING
        if token is not None
        else SequenceState.FAILED
    )
    return SequenceOutput(
        sequence_id=SequenceId(0),
        token=token,
        token_offset=offset,
        cached_tokens=16,
        state=state,
        finish_reason=finish,
        **changes,
    )


def test_steps_that_were_not_taken_become_one_row_a_sequence() -> None:
    outbox = Outbox()
    for step in range(500):
        outbox.add(1, output(step, step))
        outbox.add(2, output(1000 + step, 7 + step, FinishReason.LENGTH if step == 499 else None))
    (message,) = outbox.take(IDLE)
    assert list(message.step.handles) == [1, 2]
    assert list(message.step.token_offsets) == [0, 7]
    assert list(message.step.token_counts) == [500, 500]
    assert list(message.step.token_ids) == [*range(500), *range(1000, 1500)]
    assert list(message.step.finish_reasons) == [0, 2]
    assert outbox.take(IDLE) == []


def test_only_the_newest_ping_is_answered() -> None:
    outbox = Outbox()
    outbox.reported = IDLE
    for nonce in range(2000):
        outbox.answer_ping(nonce, IDLE)
    assert [message.pong.nonce for message in outbox.take(IDLE)] == [1999]


def test_the_load_is_said_once_for_each_change() -> None:
    outbox = Outbox()
    assert len(outbox.take(IDLE)) == 1
    assert outbox.take(IDLE) == []


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
