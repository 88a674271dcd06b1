"""Outbox: what waits to be sent to one router. Outputs of its requests are merged until the router takes them.

It is bounded however slowly the router reads. It holds one row for each output of its requests, one load, one pong and
one drain state. For each request it holds at most one rejection and one report of a pull. Marks of prompts have a limit
in bytes, phases of requests one in number. Pure; one event loop owns it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from blockyard.proto.naming.marks import MARK_BYTES, MAX_MARKS_BYTES, split_marks
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.proto.v1.cluster_pb2 import WorkerIndex
from blockyard.proto.v1.session_pb2 import (
    Draining,
    Pong,
    PullReport,
    Rejected,
    RejectReason,
    RowDetails,
    StepOutput,
    ToRouter,
)
from blockyard.worker.engine_types import EngineLoad, SequenceOutput
from blockyard.worker.inspection.pool_view import load_message
from blockyard.worker.sequences.phases import Phase
from blockyard.worker.sequences.sequence import FinishReason, TokenLogprob

FINISH_REASONS = {None: 0, FinishReason.STOP: 1, FinishReason.LENGTH: 2}
MAX_LOGPROBS_A_MESSAGE = 500_000
"""About 6 MB. The logprobs of several long prompts in one message would exceed what a router takes. One row is never
split."""
LOGPROB_BYTES = 12
MAX_DETAIL_CHARACTERS = 200
MAX_PHASES = 1024

_Key = tuple[int, int]
"""A request's handle (the router's number of it), and the index of one of its outputs."""


@dataclass(slots=True)
class _Row:
    """The part of one output that the router has not taken yet."""

    token_offset: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: int = 0
    stop_token: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cumulative_logprob: float | None = None
    beam_score: float | None = None
    embedding: bytes = b""

    def add(self, output: SequenceOutput) -> None:
        self.token_ids += output.token_ids
        self.finish_reason = FINISH_REASONS[output.finish_reason]
        self.stop_token = 0 if output.stop_token is None else output.stop_token + 1
        self.cached_tokens = output.cached_tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.cumulative_logprob, self.beam_score = output.cumulative_logprob, output.beam_score
        self.embedding = output.embedding

    @property
    def num_logprobs(self) -> int:
        """Return how many logprobs take as much room in a message as this row does."""
        num_logprobs = sum(1 + len(logprob.top) for logprob in (*self.logprobs, *self.prompt_logprobs))
        return num_logprobs + len(self.embedding) // LOGPROB_BYTES

    @property
    def has_details(self) -> bool:
        return bool(self.logprobs or self.prompt_logprobs or self.embedding) or self.beam_score is not None

    def details(self, number: int) -> RowDetails:
        return RowDetails(
            row=number,
            logprobs=[_logprob_message(logprob) for logprob in self.logprobs],
            prompt_logprobs=[_logprob_message(logprob) for logprob in self.prompt_logprobs],
            cumulative_logprob=self.cumulative_logprob,
            beam_score=self.beam_score,
            embedding=self.embedding,
        )


class Outbox:
    """Takes the results of steps for one router, and returns messages to it."""

    def __init__(self) -> None:
        self._rows: dict[_Key, _Row] = {}
        self._failed: dict[int, RejectReason] = {}
        self._rejected: list[Rejected] = []
        self._pong: Pong | None = None
        self._pong_load: EngineLoad | None = None
        self._is_draining: bool | None = None
        self._arrived_marks = b""
        self._pulls: list[PullReport] = []
        self._phases = deque[session_pb2.Phase](maxlen=MAX_PHASES)
        self._withdrawn_marks: dict[bytes, None] = {}
        self.last_handle = 0
        """Handle of the router's last request. The loads in messages count it."""
        self.reported: EngineLoad | None = None
        """The load in the last message that had one."""

    def add(self, handle: int, output: SequenceOutput) -> None:
        """Merge a step's results of one output into what waits. Tokens are sent before their request's failure."""
        if not (output.token_ids or output.embedding):
            self.fail(handle, _failure(output))
            return
        row = self._rows.setdefault((handle, output.index), _Row(token_offset=output.token_offset))
        row.add(output)

    def fail(self, handle: int, reason: RejectReason) -> None:
        """Report that a request which ran has ended for this reason. Its tokens so far are sent before."""
        self._failed[handle] = reason

    def tell_draining(self, is_draining: bool) -> None:
        """Report the drain state, before everything else."""
        self._is_draining = is_draining

    def tell_arrival(self, marks: bytes) -> None:
        """Report the marks of a prompt that has reached the worker. A slow router gets those of the last prompts."""
        self._arrived_marks = (self._arrived_marks + marks)[-MAX_MARKS_BYTES:]
        if self._withdrawn_marks:
            for mark in split_marks(marks):
                self._withdrawn_marks.pop(mark, None)

    def tell_withdrawal(self, marks: bytes) -> None:
        """Report the marks of prompts that ended before they were computed. A slow router does not hear of all."""
        self._withdrawn_marks.update(dict.fromkeys(split_marks(marks)))
        while len(self._withdrawn_marks) * MARK_BYTES > MAX_MARKS_BYTES:
            del self._withdrawn_marks[next(iter(self._withdrawn_marks))]

    def report_pull(self, report: PullReport) -> None:
        """Report a pull that has ended: one for each request at most."""
        self._pulls.append(report)

    def report_phase(self, handle: int, phase: Phase) -> None:
        """Report a phase that has ended. A slow router hears of the last ones alone."""
        self._phases.append(
            session_pb2.Phase(
                handle=handle,
                kind=f"PHASE_KIND_{phase.kind.name}",
                began_seconds=phase.began_seconds,
                ended_seconds=phase.ended_seconds,
                steps=phase.steps,
                tokens=phase.tokens,
            )
        )

    def reject(self, handle: int, reason: RejectReason, detail: str = "") -> None:
        detail = detail[:MAX_DETAIL_CHARACTERS]
        self._rejected.append(Rejected(handle=handle, reason=reason, detail=detail))

    def answer_ping(
        self,
        nonce: int,
        load: EngineLoad,
        index: WorkerIndex | None = None,
        *,
        stalled_seconds: float = 0.0,
        is_draining: bool = False,
    ) -> None:
        """Answer the newest ping. It says all that answers to older pings would."""
        self._pong_load = load
        self._pong = Pong(
            nonce=nonce,
            load=load_message(load),
            index=index,
            stalled_seconds=stalled_seconds,
            is_draining=is_draining,
            last_handle=self.last_handle,
        )

    def take(self, load: EngineLoad) -> list[ToRouter]:
        """Return everything that waits as messages, and the load if it has changed. Nothing waits afterwards."""
        messages = []
        if self._is_draining is not None:
            messages.append(ToRouter(draining=Draining(is_draining=self._is_draining)))
        messages += [ToRouter(rejected=rejected) for rejected in self._rejected]
        if self._pong is not None:
            messages.append(ToRouter(pong=self._pong))
            self.reported = self._pong_load
        marks = self._arrived_marks or self._withdrawn_marks
        if self._rows or self._failed or marks or self._pulls or self._phases or load != self.reported:
            self.reported = load
            steps = [_columns(rows) for rows in _portions(self._rows.items())]
            steps[-1].failed_handles.extend(self._failed)
            steps[-1].failed_reasons.extend(self._failed.values())
            steps[-1].load.CopyFrom(load_message(load))
            steps[-1].last_handle = self.last_handle
            steps[-1].arrived_marks = self._arrived_marks
            steps[-1].withdrawn_marks = b"".join(self._withdrawn_marks)
            steps[-1].pulls.extend(self._pulls)
            # A router drops what comes after a request's last row.
            steps[0].phases.extend(self._phases)
            messages += [ToRouter(step=step) for step in steps]
        self._rows, self._failed, self._rejected, self._pong = {}, {}, [], None
        self._is_draining, self._arrived_marks, self._withdrawn_marks = None, b"", {}
        self._pulls = []
        self._phases.clear()
        return messages


def _failure(output: SequenceOutput) -> RejectReason:
    if output.expired:
        return RejectReason.REJECT_REASON_DEADLINE
    if output.is_given_back:
        return RejectReason.REJECT_REASON_PREEMPTED
    return (
        RejectReason.REJECT_REASON_NO_CHOICE if output.has_no_choice else RejectReason.REJECT_REASON_INTERNAL
    )


def _portions(rows: Iterable[tuple[_Key, _Row]]) -> Iterator[dict[_Key, _Row]]:
    """Split rows into messages: at least one portion, which may be empty."""
    portion: dict[_Key, _Row] = {}
    num_logprobs = 0
    for key, row in rows:
        num_logprobs += row.num_logprobs
        if portion and num_logprobs > MAX_LOGPROBS_A_MESSAGE:
            yield portion
            portion, num_logprobs = {}, row.num_logprobs
        portion[key] = row
    yield portion


def _columns(waiting: dict[_Key, _Row]) -> StepOutput:
    rows = waiting.values()
    has_indexes = any(index for _, index in waiting)
    return StepOutput(
        handles=[handle for handle, _ in waiting],
        indexes=[index for _, index in waiting] if has_indexes else [],
        token_offsets=[row.token_offset for row in rows],
        token_counts=[len(row.token_ids) for row in rows],
        token_ids=[token for row in rows for token in row.token_ids],
        finish_reasons=[row.finish_reason for row in rows],
        stop_tokens=[row.stop_token for row in rows],
        cached_tokens=[row.cached_tokens for row in rows],
        details=[row.details(number) for number, row in enumerate(rows) if row.has_details],
    )


def _logprob_message(logprob: TokenLogprob) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        rank=logprob.rank,
        top=[inference_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprob.top],
    )
