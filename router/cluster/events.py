"""What a worker says of one request, out of the columns in which it says it of many.

Pure. Owns the events that a request's sink gets. Does not own the stream (link.py) nor what follows from an
event (generation/relay.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from blockyard.proto.v1 import inference_pb2, session_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The next tokens of one output of a request, in order."""

    offset: int
    """Tokens of this output generated before these, by any worker."""
    token_ids: list[int]
    finish_reason: int
    """FinishReason of the contract; 0 while the output runs on."""
    stop_token: int | None
    cached_tokens: int
    index: int = 0
    """Which of the request's outputs."""
    logprobs: Sequence[inference_pb2.TokenLogprob] = ()
    """One for each token, or none at all."""
    prompt_logprobs: Sequence[inference_pb2.TokenLogprob] = ()
    cumulative_logprob: float | None = None
    """Of a finished beam."""
    beam_score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The worker will not run it, or not any further."""

    reason: int
    """RejectReason of the contract."""
    detail: str = ""
    """Fit for the client; empty where the reason says all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The stream ended; what the worker still computes nobody will see."""

    was_sent: bool = True
    """False where the link was down already: the worker never heard of the request."""
    is_death: bool = True
    """False where it was given up for its silence, or ended the stream properly."""


Event = Tokens | Refused | Lost
Sink = Callable[[Event], None]


def events_of(step: session_pb2.StepOutput) -> list[tuple[int, Tokens | Refused]]:
    """(handle, event), the rows in order and then the failures. Raises ValueError for columns that contradict each
    other."""
    details = _details(step)
    token_ids = list(step.token_ids)
    indexes = list(step.indexes) or [0] * len(step.handles)
    events: list[tuple[int, Tokens | Refused]] = []
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
        raise ValueError("columns that do not add up")
    failed = zip(step.failed_handles, step.failed_reasons, strict=True)
    return events + [(handle, Refused(reason=reason)) for handle, reason in failed]


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
    """By row. Copies: a part of a message keeps all of it in memory, and these wait for their client."""
    found: dict[int, session_pb2.RowDetails] = {}
    for detail in step.details:
        if detail.row in found:
            raise ValueError("a row has details twice")
        found[detail.row] = session_pb2.RowDetails()
        found[detail.row].CopyFrom(detail)
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
    )
