"""Assembly: turns the tokens of a request's outputs into deltas of text and log-probabilities.

Owns the counts, times and reason in the Finish message that ends an output. Does not own when text is safe to show
(proto/text.py) or where tokens come from (relay.py).
"""

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from blockyard.proto.text import Piece, TextOutput
from blockyard.proto.v1 import inference_pb2
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.generation.joined_outputs import EngineFinish, TokenChunk
from blockyard.router.generation.registry import RequestRecord
from blockyard.router.parsing.formats import NO_END, PromptEnd
from blockyard.router.request.sampling import SamplingRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Assembly:
    """Turns the chunks of one request's outputs into deltas for the client."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        sampling: SamplingRequest,
        record: RequestRecord,
        *,
        clock: Callable[[], float],
        prompt_token_ids: Sequence[int] = (),
        prompt_end: PromptEnd = NO_END,
        shown_tokens: Set[int] = frozenset(),
    ) -> None:
        """`prompt_token_ids` and `prompt_end` go out with the first delta of each output. `shown_tokens` are special
        tokens whose text is wanted."""
        self._outputs = [
            _OutputAssembly(tokenizer, sampling, record, clock=clock, shown_tokens=shown_tokens)
            for _ in range(sampling.n)
        ]
        self._prompt_token_ids = dict.fromkeys(range(sampling.n), prompt_token_ids)
        self._prompt_end = prompt_end

    def delta(self, chunk: TokenChunk) -> Delta:
        """Return the delta of a chunk. It has a finish if the engine or a stop string ended the output.

        An output with a finish gets no more chunks.
        """
        delta = self._outputs[chunk.index].delta(chunk)
        if chunk.index in self._prompt_token_ids:
            delta.prompt_token_ids = self._prompt_token_ids.pop(chunk.index)
            delta.prompt_end = self._prompt_end
        return delta


class _OutputAssembly:
    """Text of one output so far, with the counts and times for its last delta."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        sampling: SamplingRequest,
        record: RequestRecord,
        *,
        clock: Callable[[], float],
        shown_tokens: Set[int],
    ) -> None:
        self._clock = clock
        self._sampling = sampling
        self._record = record
        self._text = TextOutput(
            tokenizer,
            stop=sampling.stop,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            include_stop=sampling.include_stop_in_output,
            skip_special=sampling.skip_special_tokens,
            shown=shown_tokens,
        )
        self._num_tokens = 0
        self._logprob = 0.0
        self._first_token_at: float | None = None

    def delta(self, chunk: TokenChunk) -> Delta:
        if self._first_token_at is None:
            self._first_token_at = self._clock()
        stop_token = None if chunk.finish is None else chunk.finish.stop_token
        piece = self._text.push(chunk.token_ids, is_last=chunk.finish is not None, stop_token=stop_token)
        self._num_tokens += len(piece.token_ids)
        logprobs: list[inference_pb2.TokenLogprob] = []
        if chunk.logprobs:
            # A stop string may have cut tokens off.
            logprobs = list(chunk.logprobs[: len(piece.token_ids)])
            self._logprob += sum(token.logprob for token in logprobs)
        return Delta(
            text=piece.text,
            token_ids=piece.token_ids,
            token_offset=chunk.offset,
            finish=self._finish(chunk, piece),
            index=chunk.index,
            logprobs=[] if self._sampling.logprobs is None else logprobs,
            prompt_logprobs=chunk.prompt_logprobs,
            prompt_tokens=self._record.prompt_tokens,
            cached_tokens=self._record.progress.cached_tokens or 0,
            embedding=chunk.embedding,
        )

    def _finish(self, chunk: TokenChunk, piece: Piece) -> inference_pb2.Finish | None:
        if piece.stop is None and chunk.finish is None:
            return None
        reason, stop_reason = inference_pb2.FINISH_REASON_STOP, piece.stop
        if piece.stop is None and chunk.finish is not None:
            reason = chunk.finish.reason
            # An end-of-sequence token is the model's own way to stop and gives no stop reason.
            if chunk.finish.stop_token in self._sampling.stop_token_ids:
                stop_reason = str(chunk.finish.stop_token)
        assert self._first_token_at is not None
        return inference_pb2.Finish(
            reason=reason,
            stop_reason=stop_reason,
            usage=inference_pb2.Usage(
                prompt_tokens=self._record.prompt_tokens,
                completion_tokens=self._num_tokens,
                cached_tokens=self._record.progress.cached_tokens or 0,
            ),
            seed=self._sampling.seed,
            timing=inference_pb2.Timing(
                time_to_first_token_seconds=self._first_token_at - self._record.arrival,
                total_seconds=self._clock() - self._record.arrival,
            ),
            worker_id=self._record.progress.worker_id,
            migrations=self._record.progress.num_migrations,
            cumulative_logprob=self._cumulative_logprob(chunk.finish),
            beam_score=chunk.finish.beam_score if chunk.finish else None,
        )

    def _cumulative_logprob(self, finish: EngineFinish | None) -> float | None:
        if not self._sampling.wants_score:
            return None
        if self._sampling.beam_width:
            return finish.cumulative_logprob if finish else None
        return self._logprob
