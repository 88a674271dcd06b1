"""Completions: the results of offline generation, gathered as their tokens come.

Does not own where a stop cuts the text (proto/text.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.proto.text import TextOutput
from blockyard.worker.engine_types import SequenceOutput
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One of a prompt's outputs."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string, or the id of the token, that ended the text."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token, if asked for."""
    cumulative_logprob: float | None = None
    """Set for a beam, or where logprobs were asked for."""
    beam_score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One prompt's answer."""

    outputs: tuple[Output, ...]
    """`n` outputs. Those of a beam search are in order, the best first."""
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token of the prompt but the first, if asked for."""

    @property
    def text(self) -> str:
        """Text of the first output. The next three properties are also of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason


class GrowingOutput:
    """Builds one output from the results of steps."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        sampling: SamplingParams,
        *,
        stop: Sequence[str],
        include_stop: bool,
    ) -> None:
        """Raises ValueError for an empty stop string."""
        self._output = TextOutput(
            tokenizer,
            stop=stop,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            include_stop=include_stop,
        )
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._cumulative_logprob: float | None = None
        self._beam_score: float | None = None
        self._stop_reason: str | int | None = None
        self.finish_reason: FinishReason | None = None
        """None while more may come. A stop string sets it before the engine knows."""

    def add(self, output: SequenceOutput) -> None:
        """Append a step's result, which has at least one token. The output must not have finished."""
        assert self.finish_reason is None
        piece = self._output.push(
            output.token_ids, is_last=output.finish_reason is not None, stop_token=output.stop_token
        )
        self._text.append(piece.text)
        self._token_ids += piece.token_ids
        self._logprobs += output.logprobs[: len(piece.token_ids)]
        self._cumulative_logprob, self._beam_score = output.cumulative_logprob, output.beam_score
        self.finish_reason, self._stop_reason = output.finish_reason, output.stop_token
        if piece.stop is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, piece.stop

    def output(self) -> Output:
        """Return the output once it has finished."""
        assert self.finish_reason is not None
        summed = sum(token.logprob for token in self._logprobs) if self._logprobs else None
        return Output(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=tuple(self._logprobs),
            cumulative_logprob=summed if self._cumulative_logprob is None else self._cumulative_logprob,
            beam_score=self._beam_score,
        )
