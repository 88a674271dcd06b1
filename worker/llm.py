"""Offline generation, with no server, Redis or Ray: `LLM(model).generate(prompts)`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockyard.proto.block_hash import chain, root_name
from blockyard.proto.text import IncrementalDetokenizer, StopChecker, load_tokenizer
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import EngineRequest, SequenceOutput
from blockyard.worker.loading import load_engine
from blockyard.worker.sequence import BlockName, FinishReason, SamplingParams, SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One prompt's answer."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string, or the id of the token, that ended the text."""


class LLM:
    """One model in this process. Keyword arguments are EngineConfig's. Raises ValueError as loading does."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = EngineConfig(model=model, **settings)
        self._loaded = load_engine(self.config)
        self.tokenizer = load_tokenizer(self._loaded.model_path)
        self._root = root_name(
            cluster_secret="",
            model_fingerprint=self._loaded.model_fingerprint,
            block_size=self.config.block_size,
            kv_dtype=self._loaded.dtype,
        )

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Runs all prompts (texts, or token ids) together; completions in the order of the prompts.

        Every prompt uses the same sampling; its end-of-sequence tokens are the model's unless it names others. Stop
        strings count from the text after `min_tokens`. Raises ValueError for an empty prompt or one that can never fit.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        sampling = sampling or SamplingParams(max_tokens=128)
        ends = frozenset() if ignore_eos else sampling.eos_token_ids or self._loaded.model.eos_token_ids
        sampling = replace(sampling, eos_token_ids=ends)
        answers: dict[SequenceId, _Answer] = {}
        try:
            for text in texts:
                self._submit(text, sampling, stop, answers)
            while self._loaded.engine.has_work:
                for output in self._loaded.engine.step().outputs:
                    self._take(answers[output.sequence_id], output)
        finally:
            for sequence_id in answers:
                self._loaded.engine.cancel(sequence_id)
        return [answer.completion() for answer in answers.values()]

    def _submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        stop: Sequence[str],
        answers: "dict[SequenceId, _Answer]",
    ) -> None:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if any(not 0 <= token < self._loaded.model.vocab_size for token in token_ids):
            raise ValueError(f"token ids must be below {self._loaded.model.vocab_size}")
        names = [self._root, *chain(self._root, token_ids, self.config.block_size)]
        request = EngineRequest(
            token_ids=token_ids,
            prompt_length=len(token_ids),
            names=[BlockName(name) for name in names],
            sampling=sampling,
        )
        answer = _Answer(
            len(token_ids), IncrementalDetokenizer(self.tokenizer), StopChecker(stop), sampling.min_tokens
        )
        answers[self._loaded.engine.submit(request)] = answer

    def _take(self, answer: "_Answer", output: SequenceOutput) -> None:
        if output.token is None:
            raise RuntimeError("the engine failed on this prompt; its log says why")
        answer.add(output)
        if answer.stop_reason is not None:
            self._loaded.engine.cancel(output.sequence_id)


class _Answer:
    """What has come for one prompt so far."""

    def __init__(
        self, prompt_tokens: int, detokenizer: IncrementalDetokenizer, stops: StopChecker, min_tokens: int
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._cached_tokens = 0
        self._finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def add(self, output: SequenceOutput) -> None:
        assert output.token is not None
        self._token_ids.append(output.token)
        self._cached_tokens = output.cached_tokens
        self._finish_reason = output.finish_reason
        delta = "" if output.stop_token is not None else self._detokenizer.push([output.token])
        if output.finish_reason is not None:
            delta += self._detokenizer.finish()
        if len(self._token_ids) <= self._min_tokens and output.finish_reason is None:
            self._text.append(delta)
            return
        safe, stop = self._stops.push(delta)
        self._text.append(safe)
        if stop is None and output.finish_reason is not None:
            safe, stop = self._stops.finish()
            self._text.append(safe)
        if stop is not None:
            self.stop_reason, self._finish_reason = stop, FinishReason.STOP
        else:
            self.stop_reason = output.stop_token

    def completion(self) -> Completion:
        assert self._finish_reason is not None
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            finish_reason=self._finish_reason,
            stop_reason=self.stop_reason,
        )
