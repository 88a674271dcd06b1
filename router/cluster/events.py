"""Events of one request, unpacked from the columns of a worker's step message, and the sinks that get them.

Pure. Owns the events that a request's sink gets, and the table of one link's open requests. Does not own the stream
(link.py) or the reaction to an event (generation/relay.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from blockyard.proto.v1 import inference_pb2, session_pb2
from google.protobuf.message import Message

P = TypeVar("P", bound=Message)


# Not frozen, as one is made for each row of a step: a frozen dataclass takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class Tokens:
    """The next tokens of one output of a request, in order."""

    offset: int
    """Number of tokens of this output before these, by whichever worker."""
    token_ids: list[int]
    finish_reason: int
    """A FinishReason of inference.proto. 0 while the output runs."""
    stop_token: int | None
    """End-of-sequence or stop token that ended the output."""
    cached_tokens: int
    """Prompt tokens that the worker reused."""
    index: int = 0
    """Index of the output within the request."""
    logprobs: Sequence[inference_pb2.TokenLogprob] = ()
    """One per token, or none if the client wants none."""
    prompt_logprobs: Sequence[inference_pb2.TokenLogprob] = ()
    cumulative_logprob: float | None = None
    """Set for a finished beam."""
    beam_score: float | None = None
    embedding: bytes = b""
    """The prompt's embedding, which ends a request for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The worker refuses the request, or has ended it without a result."""

    reason: int
    """A RejectReason of session.proto."""
    detail: str = ""
    """Text about the reason for the client. Empty if the reason is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The request's pull has ended."""

    report: session_pb2.PullReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded:
    """A phase of the request on the worker has ended. Only a request of which a trace is made gets it."""

    phase: session_pb2.Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The stream to the worker is down. No further output of the request can arrive on it."""

    was_sent: bool = True
    """False if the link was down already: the worker never received the request."""
    is_death: bool = True
    """False if the worker is not known to have died: it was silent for too long, or ended the stream with status OK."""


Reported = Tokens | Refused | Pulled | PhaseEnded
"""A worker's report of a request."""
Event = Reported | Lost
Sink = Callable[[Event], None]


def events_of(step: session_pb2.StepOutput) -> list[tuple[int, Reported]]:
    """Return (handle, event) pairs: first pulls and phases, then the rows in order, then the failures. A handle is a
    request's number on the stream.

    Raises ValueError for inconsistent columns.
    """
    details = _details(step)
    token_ids = list(step.token_ids)
    indexes = list(step.indexes) or [0] * len(step.handles)
    events: list[tuple[int, Reported]] = [
        (report.handle, Pulled(report=_copied(report))) for report in step.pulls
    ]
    events += [(phase.handle, PhaseEnded(phase=_copied(phase))) for phase in step.phases]
    end = 0
    for row, (handle, index, offset, count, finish, stop, cached) in enumerate(_rows(step, indexes)):
        start, end = end, end + count
        detail = details.get(row)
        tokens = Tokens(
            index=index,
            offset=offset,
            token_ids=token_ids[start:end],
            finish_reason=finish,
            stop_token=stop - 1 if stop else None,
            cached_tokens=cached,
        )
        events.append((handle, tokens if detail is None else _with_details(tokens, detail)))
    if end != len(token_ids) or any(row >= len(indexes) for row in details):
        raise ValueError("columns of different lengths")
    failed = zip(step.failed_handles, step.failed_reasons, strict=True)
    return events + [(handle, Refused(reason=reason)) for handle, reason in failed]


def _copied(part: P) -> P:
    """Return a copy. The part itself would keep the whole message in memory."""
    copy = type(part)()
    copy.CopyFrom(part)
    return copy


def _rows(step: session_pb2.StepOutput, indexes: list[int]) -> Iterator[tuple[int, ...]]:
    return zip(
        step.handles,
        indexes,
        step.token_offsets,
        step.token_counts,
        step.finish_reasons,
        step.stop_tokens,
        step.cached_tokens,
        strict=True,
    )


def _details(step: session_pb2.StepOutput) -> dict[int, session_pb2.RowDetails]:
    """Return copies of the details, by row. A detail itself would keep the whole message in memory.

    Raises ValueError for a row with two of them.
    """
    found: dict[int, session_pb2.RowDetails] = {}
    for detail in step.details:
        if detail.row in found:
            raise ValueError("a row has details twice")
        found[detail.row] = _copied(detail)
    return found


def _with_details(tokens: Tokens, detail: session_pb2.RowDetails) -> Tokens:
    if detail.logprobs and len(detail.logprobs) != len(tokens.token_ids):
        raise ValueError("a row has more or fewer log-probabilities than tokens")
    return Tokens(
        index=tokens.index,
        offset=tokens.offset,
        token_ids=tokens.token_ids,
        finish_reason=tokens.finish_reason,
        stop_token=tokens.stop_token,
        cached_tokens=tokens.cached_tokens,
        logprobs=tuple(detail.logprobs),
        prompt_logprobs=tuple(detail.prompt_logprobs),
        cumulative_logprob=detail.cumulative_logprob if detail.HasField("cumulative_logprob") else None,
        beam_score=detail.beam_score if detail.HasField("beam_score") else None,
        embedding=detail.embedding,
    )


@dataclass(frozen=True, slots=True)
class _Open:
    """One open request."""

    sink: Sink
    outputs: set[int]
    """Indexes of the outputs that have not ended."""


class OpenRequests:
    """Table of the requests that one worker runs for this router, by handle (their number on the stream).

    A request leaves it when its last output ends, when it is refused or cancelled, or when the stream is lost.
    """

    def __init__(self) -> None:
        self._by_handle: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._by_handle)

    def add(self, handle: int, sink: Sink, outputs: Iterable[int]) -> None:
        self._by_handle[handle] = _Open(sink, set(outputs))

    def cancel(self, handle: int, index: int | None) -> tuple[bool, int | None]:
        """Remove a request, whose sink then gets nothing more, or end one of its outputs.

        Return whether to tell the worker, and which output to cancel there. None stands for the whole request, also
        after its last output.
        """
        request = self._by_handle.get(handle)
        if request is None or (index is not None and index not in request.outputs):
            return False, None
        if index is not None:
            request.outputs.discard(index)
            if request.outputs:
                return True, index
        del self._by_handle[handle]
        return True, None

    def deal(self, handle: int, event: Reported) -> None:
        """Pass an event to the request's sink, and remove the request with its last output. A cancelled request has no
        sink.

        Events of a single cancelled output still reach the sink, which ignores them.
        """
        request = self._by_handle.get(handle)
        if request is None:
            return
        match event:
            case Tokens(finish_reason=finish_reason):
                if finish_reason:
                    request.outputs.discard(event.index)
            case Refused():
                request.outputs.clear()
        if not request.outputs:
            del self._by_handle[handle]
        request.sink(event)

    def end_all(self, *, is_death: bool) -> None:
        requests, self._by_handle = self._by_handle, {}
        for request in requests.values():
            request.sink(Lost(is_death=is_death))
