"""Stream check: turns the messages of one stream into deltas, and checks that no token is lost or doubled.

Pure. Owns no stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from blockyard.proto.v1 import inference_pb2
from blockyard.router.client.errors import LostTokensError
from blockyard.router.client.results import Delta, Finish, FinishReason, TokenLogprob

_REASONS: dict[int, FinishReason] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True)
class _OutputCheck:
    num_tokens: int = 0
    finished: bool = False


class StreamCheck:
    """Checks one request's stream, in which its outputs may be interleaved."""

    def __init__(self, num_outputs: int = 1) -> None:
        self._num_outputs = num_outputs
        self._outputs: dict[int, _OutputCheck] = {}

    def delta(self, message: inference_pb2.GenerateStreamResponse) -> Delta:
        """Return a message as a delta, after counting its tokens.

        Raises LostTokensError if tokens are missing, repeated or too many for the output.
        """
        index = message.delta.index
        if index >= self._num_outputs:
            raise LostTokensError(f"got output {index} of {self._num_outputs}")
        output = self._outputs.setdefault(index, _OutputCheck())
        offset, token_ids = message.delta.token_offset, tuple(message.delta.token_ids)
        num_before = _follow(output, offset, len(token_ids))
        finish = _finish(message.finish) if message.HasField("finish") else None
        if finish is not None:
            _end(output, finish)
        if message.delta.logprobs and len(message.delta.logprobs) != len(token_ids):
            raise LostTokensError(f"got {len(message.delta.logprobs)} logprobs of {len(token_ids)} tokens")
        return Delta(
            request_id=message.request_id,
            text=message.delta.text,
            token_ids=token_ids,
            token_offset=num_before,
            finish=finish,
            index=index,
            logprobs=_logprobs(message.delta.logprobs),
            prompt_logprobs=_logprobs(message.delta.prompt_logprobs),
            prompt_token_ids=tuple(message.delta.prompt_token_ids),
        )

    def end(self) -> None:
        """Check the end of a stream. Raises LostTokensError if any output has no finish."""
        for index in range(self._num_outputs):
            output = self._outputs.get(index, _OutputCheck())
            if not output.finished:
                raise LostTokensError(
                    f"the stream ended after {output.num_tokens} tokens of output {index}, without its last message"
                )


def _follow(output: _OutputCheck, offset: int, num_tokens: int) -> int:
    """Count an output's new tokens, and return how many it had before. Raises LostTokensError if they do not follow."""
    num_before = output.num_tokens
    if output.finished:
        raise LostTokensError("the stream went on after its last message")
    if num_tokens and offset != num_before:
        raise LostTokensError(f"expected the token at offset {num_before}, got the one at {offset}")
    output.num_tokens += num_tokens
    return num_before


def _end(output: _OutputCheck, finish: Finish) -> None:
    if finish.completion_tokens != output.num_tokens:
        raise LostTokensError(f"got {output.num_tokens} tokens of {finish.completion_tokens}")
    output.finished = True


def _logprobs(tokens: Iterable[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=token.token_id,
            logprob=token.logprob,
            rank=token.rank,
            top=tuple((likely.token_id, likely.logprob) for likely in token.top),
        )
        for token in tokens
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
        migrations=finish.migrations,
        cumulative_logprob=finish.cumulative_logprob if finish.HasField("cumulative_logprob") else None,
        beam_score=finish.beam_score if finish.HasField("beam_score") else None,
    )
