"""Engine requests: those that have not ended, with their deadlines, and the results that they get of each step.

Owns which outputs are still to come, and the counters of tokens. Does not end sequences (the engine does).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict, Unpack

from blockyard.worker.engine_types import SequenceOutput
from blockyard.worker.scheduling.commit import BeamsUpdate, SequenceUpdate, Update
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.sequence import Sequence, SequenceState, TokenLogprob


class Ending(TypedDict, total=False):
    """How a request ends without an answer."""

    state: SequenceState
    expired: bool
    has_no_choice: bool
    is_given_back: bool


@dataclass(slots=True)
class _Request:
    """A request that has not ended: how many of its outputs have not ended, and its deadline on the engine's clock."""

    num_outputs: int
    deadline: float | None


@dataclass(slots=True)
class TokenCounters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class OpenRequests:
    """The requests of one engine that have not ended."""

    def __init__(self) -> None:
        self.counters = TokenCounters()
        self._requests: dict[RequestId, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._requests)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def open(self, request_id: RequestId, *, num_outputs: int, deadline: float | None) -> None:
        self._requests[request_id] = _Request(num_outputs=num_outputs, deadline=deadline)

    def late(self, now: float) -> set[RequestId]:
        """Return the requests whose deadline has passed."""
        return {key for key, request in self._requests.items() if is_late(request.deadline, now)}

    def end_outputs(self, request_id: RequestId, num_outputs: int | None) -> bool:
        """Count outputs of a request as ended, all with None, and return whether none is left."""
        request = self._requests[request_id]
        request.num_outputs = 0 if num_outputs is None else request.num_outputs - num_outputs
        if not request.num_outputs:
            del self._requests[request_id]
        return not request.num_outputs

    def end(self, request_id: RequestId, **how: Unpack[Ending]) -> SequenceOutput:
        """End a request, and return the result without tokens that says so. Its state is CANCELLED by default."""
        del self._requests[request_id]
        how.setdefault("state", SequenceState.CANCELLED)
        return SequenceOutput(
            request_id=request_id, token_ids=(), token_offset=0, cached_tokens=0, is_last=True, **how
        )

    def outputs(self, update: Update) -> list[SequenceOutput]:
        """Return the results of an update that has tokens or an embedding."""
        match update:
            case BeamsUpdate():
                return self._beam_outputs(update)
            case SequenceUpdate(token=None):
                return [self._embedding(update)]
            case SequenceUpdate():
                return [self._output(update)]

    def _output(self, update: SequenceUpdate) -> SequenceOutput:
        sequence, token_ids = update.sequence, update.token_ids
        assert token_ids
        cached = sequence.cached_tokens or 0
        self.counters.generated_tokens += len(token_ids)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if sequence.num_generated == 1 and sequence.index == 0:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
            self._count_prompt(sequence)
        return SequenceOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=token_ids,
            token_offset=sequence.num_generated - len(token_ids),
            cached_tokens=cached,
            state=sequence.state,
            finish_reason=sequence.finish_reason,
            stop_token=sequence.stop_token,
            logprobs=update.logprobs,
            prompt_logprobs=prompt_logprobs,
            is_last=sequence.is_over and self.end_outputs(sequence.request_id, 1),
        )

    def _embedding(self, update: SequenceUpdate) -> SequenceOutput:
        sequence = update.sequence
        self._count_prompt(sequence)
        return SequenceOutput(
            request_id=sequence.request_id,
            token_ids=(),
            token_offset=0,
            cached_tokens=sequence.cached_tokens or 0,
            state=sequence.state,
            finish_reason=sequence.finish_reason,
            embedding=update.embedding,
            is_last=self.end_outputs(sequence.request_id, 1),
        )

    def _count_prompt(self, sequence: Sequence) -> None:
        self.counters.prompt_tokens += sequence.prompt_length
        self.counters.cached_tokens += sequence.cached_tokens or 0

    def _beam_outputs(self, update: BeamsUpdate) -> list[SequenceOutput]:
        sequence = update.sequence
        self.end_outputs(sequence.request_id, 1)
        self._count_prompt(sequence)
        self.counters.generated_tokens += sum(len(beam.token_ids) for beam in update.hypotheses)
        last = len(update.hypotheses) - 1
        return [
            SequenceOutput(
                request_id=sequence.request_id,
                index=index,
                token_ids=beam.token_ids,
                token_offset=0,
                cached_tokens=sequence.cached_tokens or 0,
                state=SequenceState.FINISHED,
                finish_reason=beam.finish_reason,
                stop_token=beam.stop_token,
                cumulative_logprob=beam.cumulative_logprob,
                beam_score=beam.score,
                is_last=index == last,
            )
            for index, beam in enumerate(update.hypotheses)
        ]


def is_late(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
