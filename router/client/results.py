"""What the clients hand out: deltas, completions, and the proof that no token was lost or doubled.

Pure: turns messages into values. Owns no stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blockyard.proto.v1 import inference_pb2
from blockyard.router.client.errors import LostTokensError

FinishReason = Literal["stop", "length", "unspecified"]
_REASONS: dict[int, FinishReason] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How an output ended, and what it took."""

    reason: FinishReason
    stop_reason: str | None
    """The stop string, or the stop token's id in decimal, that ended the output."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was really reused."""
    seed: int
    time_to_first_token_seconds: float
    total_seconds: float
    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One piece of a streamed output. The last one carries `finish`."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    token_offset: int
    """Tokens of this output before token_ids[0]; checked to be contiguous."""
    finish: Finish | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole output."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish


class StreamCheck:
    """Turns the messages of one stream into deltas and proves that no token was lost or doubled."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._finished = False

    def delta(self, message: inference_pb2.GenerateStreamResponse) -> Delta:
        """Raises LostTokensError where token_offset is not the number of tokens before."""
        offset, token_ids = message.delta.token_offset, tuple(message.delta.token_ids)
        if self._finished:
            raise LostTokensError("the stream went on after its last message")
        if token_ids and offset != self._num_tokens:
            raise LostTokensError(f"expected the token at offset {self._num_tokens}, got the one at {offset}")
        self._num_tokens += len(token_ids)
        finish = _finish(message.finish) if message.HasField("finish") else None
        if finish is not None and finish.completion_tokens != self._num_tokens:
            raise LostTokensError(f"got {self._num_tokens} tokens of {finish.completion_tokens}")
        self._finished = finish is not None
        return Delta(
            request_id=message.request_id,
            text=message.delta.text,
            token_ids=token_ids,
            token_offset=self._num_tokens - len(token_ids),
            finish=finish,
        )

    def end(self) -> None:
        """Raises LostTokensError where the stream ended without saying how."""
        if not self._finished:
            raise LostTokensError(
                f"the stream ended after {self._num_tokens} tokens, without its last message"
            )


def completion(deltas: Sequence[Delta]) -> Completion:
    """All deltas of one finished stream as a whole."""
    last = deltas[-1]
    assert last.finish is not None, "a finished stream ends with its finish"
    return Completion(
        request_id=last.request_id,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish=last.finish,
    )


def _finish(finish: inference_pb2.Finish) -> Finish:
    return Finish(
        reason=_REASONS.get(finish.reason, "unspecified"),
        stop_reason=finish.stop_reason if finish.HasField("stop_reason") else None,
        prompt_tokens=finish.usage.prompt_tokens,
        completion_tokens=finish.usage.completion_tokens,
        cached_tokens=finish.usage.cached_tokens,
        seed=finish.seed,
        time_to_first_token_seconds=finish.timing.time_to_first_token_seconds,
        total_seconds=finish.timing.total_seconds,
        worker_id=finish.worker_id,
    )
