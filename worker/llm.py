"""Offline generation, with no server, Redis or Ray: `LLM(model).generate(prompts)`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.proto.text import load_tokenizer
from blockyard.worker.completions import Completion, GrowingOutput
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine_types import EngineRequest, SequenceOutput, unpack_embedding
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import TokenLogprob
from blockyard.worker.startup.openmp import bound_spinning

if TYPE_CHECKING:
    from blockyard.worker.grammar.compiled import CompiledGrammar
    from blockyard.worker.grammar.grammar import Grammar
    from llguidance import LLTokenizer

__all__ = ["LLM", "Completion", "SamplingParams"]


class LLM:
    """One model in this process, or in several with `tensor_parallel_size`. Keyword arguments are EngineConfig's.

    Raises ValueError as loading does.

    The garbage collector stays as it is, unlike in a worker's process. Frozen objects are never freed where they form
    cycles. Here these would be all objects that the caller has made so far, and this model once it is dropped.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = EngineConfig(model=model, **settings)
        bound_spinning()
        from blockyard.worker.lora.catalogue import AdapterCatalogue
        from blockyard.worker.parallel.ranks import ALONE
        from blockyard.worker.startup.loading import load_engine

        ranks = ALONE
        if self.config.tensor_parallel_size > 1:
            from blockyard.worker.ranks import RankLeader

            leader = RankLeader(self.config, secret="", cluster="offline")
            # The other ranks end with this object, and at the latest with this process.
            weakref.finalize(self, leader.close)
            leader.spawn()
            ranks = leader.connect()
        self._loaded = load_engine(self.config, ranks)
        self._engine = self._loaded.engine
        self._model_ends = self._loaded.model.eos_token_ids
        self._grammar_tokenizer: LLTokenizer | None = None
        self.tokenizer = load_tokenizer(self._loaded.tokenizer_path)
        reader = self._loaded.adapters
        self._adapters = None if reader is None else AdapterCatalogue(reader)
        self._root = partial(
            root_name,
            cluster_secret="",
            model_fingerprint=self._loaded.model_fingerprint,
            block_size=self.config.block_size,
            kv_dtype=self._loaded.kv_dtype,
        )

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        include_stop_in_output: bool = False,
        structured_output: Grammar | None = None,
        adapters: Sequence[str | None] = (),
    ) -> list[Completion]:
        """Run all prompts (texts, or token ids) together. Return completions in the order of the prompts.

        Every prompt uses the same sampling, so equal prompts get equal answers. The seed is 0 unless `sampling` sets
        one; ask for `n` to get different outputs. The end-of-sequence tokens are the model's unless `sampling` names
        others. Stop strings count from the text after `min_tokens`. Every output follows `structured_output`, and then
        ends. `adapters` gives each prompt a folder below `adapter_dir`, or None for the bare model.

        Raises ValueError for an empty prompt, one that can never fit, options that do not go together, or a grammar
        that cannot be compiled.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        stop = (stop,) if isinstance(stop, str) else stop
        sampling = self._complete(sampling or SamplingParams(max_tokens=128), stop, ignore_eos)
        grammar = None if structured_output is None else self._compile(structured_output, sampling)
        start_output = partial(
            GrowingOutput, self.tokenizer, sampling, stop=stop, include_stop=include_stop_in_output
        )
        answers: dict[RequestId, _Answer] = {}
        try:
            for text, adapter in zip(texts, adapters or [None] * len(texts), strict=True):
                request = self._request(text, sampling, grammar, self._adapter(adapter))
                answer = _Answer(request.prompt_length, [start_output() for _ in range(sampling.n)])
                answers[self._engine.submit(request)] = answer
            while self._engine.has_work:
                for output in self._engine.step().outputs:
                    self._take(answers[output.request_id], output)
        finally:
            for request_id in answers:
                self._engine.cancel(request_id)
        return [answer.completion() for answer in answers.values()]

    def embed(self, prompts: str | Sequence[str | Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the embeddings of all prompts (texts, or token ids), in their order.

        Raises ValueError for a model that generates, an empty prompt, or one that can never fit.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        sampling = SamplingParams(max_tokens=0, embeds=True)
        embeddings: dict[RequestId, tuple[float, ...]] = {}
        try:
            for text in texts:
                embeddings[self._engine.submit(self._request(text, sampling, None))] = ()
            while self._engine.has_work:
                for output in self._engine.step().outputs:
                    if not output.embedding:
                        raise RuntimeError("the engine failed on this prompt; its log says why")
                    embeddings[output.request_id] = unpack_embedding(output.embedding)
        finally:
            for request_id in embeddings:
                self._engine.cancel(request_id)
        return list(embeddings.values())

    def _complete(self, sampling: SamplingParams, stop: Sequence[str], ignore_eos: bool) -> SamplingParams:
        """Check the sampling, and return it with the end-of-sequence tokens that apply. Raises ValueError."""
        if stop and sampling.beam_width:
            raise ValueError("a beam search takes no stop strings")
        ends = frozenset() if ignore_eos else sampling.eos_token_ids or self._model_ends
        named = {*sampling.stop_token_ids, *sampling.allowed_token_ids, *sampling.bad_token_ids}
        self._check_tokens([*named, *ends, *(token for token, _ in sampling.logit_bias)])
        return replace(sampling, eos_token_ids=ends)

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if any(not 0 <= token < self._loaded.model.vocab_size for token in token_ids):
            raise ValueError(f"token ids must be below {self._loaded.model.vocab_size}")

    def _compile(self, grammar: Grammar, sampling: SamplingParams) -> CompiledGrammar:
        """Return the compiled grammar. Compile it in this process without a time limit: no other request waits here."""
        if self._loaded.masks is None:
            raise ValueError(
                "this engine does not support structured output: it is simulated, or llguidance is not installed"
            )
        if sampling.beam_width or sampling.min_tokens or not sampling.eos_token_ids >= self._model_ends:
            raise ValueError(
                "structured output takes no beams, no min_tokens and no end tokens but the model's"
            )
        from blockyard.worker.grammar.compiled import CompiledGrammar

        if self._grammar_tokenizer is None:
            self._grammar_tokenizer = self._loaded.tokenizer_source.load()
        compiled = CompiledGrammar(grammar, self._grammar_tokenizer)
        compiled.try_out()
        return compiled

    def _adapter(self, path: str | None) -> str:
        """Read the adapter in a folder, if it has changed, and return its fingerprint. Return "" for the bare model."""
        if path is None:
            return ""
        if self._adapters is None:
            raise ValueError("adapters need slots: set max_loras and adapter_dir")
        named, unnamed = self._adapters.add(path, path)
        self._engine.adapters.add(named.adapter)
        self._engine.adapters.remove(unnamed)
        return named.adapter.fingerprint

    def _request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        grammar: CompiledGrammar | None,
        adapter: str = "",
    ) -> EngineRequest:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_tokens(token_ids)
        root = self._root(adapter=adapter)
        names = [root, *chain(root, token_ids, self.config.block_size)]
        return EngineRequest(
            token_ids=token_ids,
            prompt_length=len(token_ids),
            names=[BlockName(name) for name in names],
            sampling=sampling,
            grammar=grammar,
            adapter=adapter,
        )

    def _take(self, answer: _Answer, output: SequenceOutput) -> None:
        if answer.is_finished(output.index):
            return  # computed before the engine heard of a stop string
        if output.has_no_choice:
            raise ValueError("the limits on a prompt's output leave no token to choose")
        if not output.token_ids:
            raise RuntimeError("the engine failed on this prompt; its log says why")
        answer.add(output)
        if answer.is_finished(output.index) and output.finish_reason is None:
            self._engine.cancel(output.request_id, output.index)


class _Answer:
    """The results of one prompt so far."""

    def __init__(self, prompt_tokens: int, outputs: list[GrowingOutput]) -> None:
        self._prompt_tokens = prompt_tokens
        self._outputs = outputs
        self._cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprob] = []

    def is_finished(self, index: int) -> bool:
        """Return whether the prompt's output `index` has finished."""
        return self._outputs[index].finish_reason is not None

    def add(self, output: SequenceOutput) -> None:
        self._outputs[output.index].add(output)
        self._cached_tokens = output.cached_tokens
        self._prompt_logprobs += output.prompt_logprobs

    def completion(self) -> Completion:
        return Completion(
            outputs=tuple(growing.output() for growing in self._outputs),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
