"""What waits to be sent to one router: news of its sequences, merged until it takes them.

Bounded however slowly the router reads: a row for each of its sequences, one load, one pong, and a rejection for each
request that it sent. Pure; one event loop owns it.
"""

from dataclasses import dataclass, field

from blockyard.proto.v1.session_pb2 import Pong, Rejected, RejectReason, StepOutput, ToRouter
from blockyard.worker.engine import EngineLoad, SequenceOutput
from blockyard.worker.pool_view import load_message
from blockyard.worker.sequence import FinishReason

FINISH_REASONS = {None: 0, FinishReason.STOP: 1, FinishReason.LENGTH: 2}


@dataclass(slots=True)
class _Row:
    """One sequence's tokens that its router has not taken yet."""

    token_offset: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: int = 0
    stop_token: int = 0
    cached_tokens: int = 0


class Outbox:
    """News in, messages out."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._failed: dict[int, RejectReason] = {}
        self._rejected: list[Rejected] = []
        self._pong: Pong | None = None
        self.reported: EngineLoad | None = None
        """The load in the last message."""

    def add(self, handle: int, output: SequenceOutput) -> None:
        """Merges a step's news of one sequence into what waits."""
        if output.token is None:
            expired = RejectReason.REJECT_REASON_DEADLINE
            self._failed[handle] = expired if output.expired else RejectReason.REJECT_REASON_INTERNAL
            return
        row = self._rows.setdefault(handle, _Row(token_offset=output.token_offset))
        row.token_ids.append(output.token)
        row.finish_reason = FINISH_REASONS[output.finish_reason]
        row.stop_token = 0 if output.stop_token is None else output.stop_token + 1
        row.cached_tokens = output.cached_tokens

    def reject(self, handle: int, reason: RejectReason) -> None:
        self._rejected.append(Rejected(handle=handle, reason=reason))

    def answer_ping(self, nonce: int, load: EngineLoad) -> None:
        """Only the newest ping is answered: it says all that older answers would."""
        self._pong = Pong(nonce=nonce, load=load_message(load))

    def take(self, load: EngineLoad) -> list[ToRouter]:
        """Everything that waits, as messages, and the load if it has changed; nothing waits afterwards."""
        messages = [ToRouter(rejected=rejected) for rejected in self._rejected]
        if self._pong is not None:
            messages.append(ToRouter(pong=self._pong))
        if self._rows or self._failed or load != self.reported:
            self.reported = load
            messages.append(ToRouter(step=self._columns(load)))
        self._rows, self._failed, self._rejected, self._pong = {}, {}, [], None
        return messages

    def _columns(self, load: EngineLoad) -> StepOutput:
        rows = self._rows.values()
        return StepOutput(
            handles=list(self._rows),
            token_offsets=[row.token_offset for row in rows],
            token_counts=[len(row.token_ids) for row in rows],
            token_ids=[token for row in rows for token in row.token_ids],
            finish_reasons=[row.finish_reason for row in rows],
            stop_tokens=[row.stop_token for row in rows],
            cached_tokens=[row.cached_tokens for row in rows],
            failed_handles=list(self._failed),
            failed_reasons=list(self._failed.values()),
            load=load_message(load),
        )
