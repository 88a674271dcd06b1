"""Request trace: when each part of one request's life began and ended, for the spans that are made at its end.

    arrival | admission | tokenise | placement | queue | attempt: pull, queue, prefill, decode | placement | ...

Pure. Only a request that is sampled has one (calls/tracing.py), which router and relay fill in. Times are on the
router's clock. A worker's times are seconds since it received the request, because clocks of two machines differ. They
are placed by when the router sent the request and heard of each phase. Does not own spans or their export.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.bookings import Placed
from blockyard.router.generation.pulls import Pull

if TYPE_CHECKING:
    from blockyard.router.generation.registry import RequestRecord

AttemptEnd = Literal[
    "finished",
    "lost",
    "failed",
    "preempted",
    "split",
    "draining",
    "busy",
    "unreachable",
    "no adapter",
    "stopped",
]
"""Why a request left a worker. `stopped`: the request itself ended, by an error or by its client."""
MAX_PHASES = 256
"""Most phases that are kept of one attempt. A worker that preempts has three for each time."""
PHASES = {
    session_pb2.PHASE_KIND_PULL: "pull",
    session_pb2.PHASE_KIND_QUEUE: "worker queue",
    session_pb2.PHASE_KIND_PREFILL: "prefill",
    session_pb2.PHASE_KIND_DECODE: "decode",
    session_pb2.PHASE_KIND_PREEMPTED: "preempted",
    session_pb2.PHASE_KIND_SWAPPED: "swapped",
}
"""Names of phases. Others are ignored: a newer worker may have more."""


class Span(NamedTuple):
    """A phase on the router's clock."""

    name: str
    began_at: float
    ended_at: float
    steps: int = 0
    tokens: int = 0


class _Heard(NamedTuple):
    """A phase as the worker reported it, and when the router heard of it."""

    phase: session_pb2.Phase
    at: float


@dataclass(slots=True, kw_only=True)
class AttemptTrace:
    """One worker's part of a request."""

    placing_at: float
    """When the choice of the worker began."""
    placed: Placed
    worker_id: str
    incarnation: str
    sent_at: float
    pull: Pull | None
    clock: Callable[[], float]
    tokens_before: int
    """Tokens of the request by earlier workers."""
    first_token_at: float | None = None
    ended_at: float = 0.0
    num_tokens: int = 0
    end: AttemptEnd = "stopped"
    _heard: list[_Heard] = field(default_factory=list)

    def over(self, at: float, end: AttemptEnd, num_generated: int) -> None:
        """Note that the request has left the worker, with so many tokens of all workers."""
        self.ended_at, self.end, self.num_tokens = at, end, num_generated - self.tokens_before

    def note_first_token(self) -> None:
        self.first_token_at = self.clock()

    def hear(self, phase: session_pb2.Phase) -> None:
        """Note a phase that has ended on the worker. Ignore what cannot be: no worker may spoil a trace."""
        at = self.clock()
        is_sound = 0 <= phase.began_seconds <= phase.ended_seconds <= at - self.sent_at
        if is_sound and phase.kind in PHASES and len(self._heard) < MAX_PHASES:
            self._heard.append(_Heard(phase, at))

    def spans(self) -> list[Span]:
        """Return the worker's phases, all within the attempt and in order.

        A phase was heard of one way after its end, and the worker got the request one way after it was sent. The least
        sum of both ways is halved, so the error is at most half of it. A decode that the worker does not report,
        because it was lost or cancelled, lasts until the attempt's end.
        """
        if not self._heard:
            return []
        ways = min(heard.at - self.sent_at - heard.phase.ended_seconds for heard in self._heard)
        reached_at = self.sent_at + ways / 2
        spans = [
            Span(
                PHASES[phase.kind],
                reached_at + phase.began_seconds,
                min(reached_at + phase.ended_seconds, self.ended_at),
                phase.steps,
                phase.tokens,
            )
            for phase, _ in self._heard
        ]
        last = spans[-1]
        if last.name == "prefill" and self.num_tokens > 1:
            spans.append(Span("decode", last.ended_at, self.ended_at, 0, self.num_tokens - 1))
        return [span for span in spans if span.began_at <= span.ended_at]


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """One request's life so far. Whoever does a part of the work notes its times."""

    arrival: float
    admitted_at: float | None = None
    tokenising: tuple[float, float] | None = None
    placing_at: float | None = None
    """When the present choice of a worker began. None: a worker has the request, or had it last."""
    attempts: list[AttemptTrace] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    record: "RequestRecord | None" = None
    """None until the request is admitted."""

    @property
    def first_token_at(self) -> float | None:
        return next((one.first_token_at for one in self.attempts if one.first_token_at is not None), None)
