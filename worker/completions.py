"""What offline generation gives back, and how an output becomes text as its tokens come.

Owns where a stop string or stop token cuts the text. The router has its own rule for streams (router/output.py), which
must agree; both stand on proto/text.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.proto.text import IncrementalDetokenizer, StopChecker
from blockyard.worker.engine_types import SequenceOutput
from blockyard.worker.sequence import FinishReason, SamplingParams, TokenLogprob

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
    """Of a beam, or where logprobs were asked for."""
    beam_score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One prompt's answer."""

    outputs: tuple[Output, ...]
    """`n` of them; of beams the best first."""
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token of the prompt but the first, if asked for."""

    @property
    def text(self) -> str:
        """Of the first output, as the three below."""
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
    """What has come of one output so far."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        sampling: SamplingParams,
        *,
        stop: Sequence[str],
        include_stop: bool,
    ) -> None:
        """Raises ValueError for an empty stop string."""
        self._sampling = sampling
        self._include_stop = include_stop
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopChecker(stop)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._cumulative_logprob: float | None = None
        self._beam_score: float | None = None
        self._stop_reason: str | int | None = None
        self.finish_reason: FinishReason | None = None
        """None while more may come. A stop string sets it before the engine knows."""

    def add(self, output: SequenceOutput) -> None:
        """Takes what a step brought, at least one token."""
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        self._cumulative_logprob, self._beam_score = output.cumulative_logprob, output.beam_score
        self.finish_reason, self._stop_reason = output.finish_reason, output.stop_token
        delta = self._detokenizer.push(self._shown(output))
        if output.finish_reason is not None:
            delta += self._detokenizer.finish()
        elif len(self._token_ids) <= self._sampling.min_tokens:
            self._text.append(delta)
            return
        self._append(delta)

    def _shown(self, output: SequenceOutput) -> tuple[int, ...]:
        """A stop token has no text, unless asked for; an end-of-sequence token never has."""
        if output.stop_token is None:
            return output.token_ids
        is_asked_for = self._include_stop and output.stop_token in self._sampling.stop_token_ids
        return output.token_ids if is_asked_for else output.token_ids[:-1]

    def _append(self, delta: str) -> None:
        safe, stop = self._stops.push(delta)
        self._text.append(safe)
        if stop is None and self.finish_reason is not None:
            safe, stop = self._stops.finish()
            self._text.append(safe)
        if stop is not None:
            self._stop_reason, self.finish_reason = stop, FinishReason.STOP
            self._text.append(stop if self._include_stop else "")

    def output(self) -> Output:
        """Once it has finished."""
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
