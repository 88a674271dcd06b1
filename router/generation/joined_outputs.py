"""Outputs of one request across its workers: tokens joined by offset, none doubled and none missing.

Pure. Owns which outputs still run and what a replay asks for again. Does not own the workers (relay.py) or text
(assembly.py).
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from blockyard.proto.naming.block_hash import pack_tokens
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.cluster.events import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFinish:
    """How the engine ended an output."""

    reason: inference_pb2.FinishReason
    stop_token: int | None
    """End-of-sequence or stop token that ended it. It is the last token of the output."""
    cumulative_logprob: float | None = None
    """Set for beams, as is beam_score."""
    beam_score: float | None = None


# Not frozen, like Tokens: a frozen dataclass takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class TokenChunk:
    """The next tokens of one output, contiguous with those before. Its last chunk carries `finish`."""

    offset: int
    """Number of tokens of this output before these."""
    token_ids: list[int]
    finish: EngineFinish | None
    index: int = 0
    logprobs: Sequence[inference_pb2.TokenLogprob] = ()
    """One per token, if requested."""
    prompt_logprobs: Sequence[inference_pb2.TokenLogprob] = ()
    """With the first chunk of output 0, if requested."""
    embedding: bytes = b""
    """The prompt's embedding, with the only chunk of a request for it."""


def without_tokens(chunk: TokenChunk) -> TokenChunk:
    """Return the only chunk of a prefetch, whose one token is dropped."""
    return TokenChunk(
        offset=0,
        token_ids=[],
        finish=EngineFinish(reason=inference_pb2.FINISH_REASON_LENGTH, stop_token=None),
        index=chunk.index,
    )


class Outputs:
    """Outputs of one request, with all their tokens so far, from whichever worker."""

    def __init__(self, sampling: session_pb2.EngineSampling) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(sampling.n or 1)]
        self._running = set(range(len(self._tokens)))
        self.num_tokens = 0
        """Number of tokens of all outputs together."""
        self._is_beams = sampling.beam_width > 0
        self._embeds = sampling.embeds
        self._wants_logprobs = sampling.HasField("logprobs")
        self.wants_prompt_logprobs = sampling.HasField("prompt_logprobs")
        """True if the client wants prompt log-probabilities and they have not arrived."""

    @property
    def running(self) -> Set[int]:
        """Return the indexes of outputs that have not ended."""
        return self._running

    @property
    def may_split(self) -> bool:
        """Return whether one worker may begin the request and another continue it. Beams would begin again, and so
        would outputs of which one has tokens and another has none. An embedding ends where it begins."""
        return not self._is_beams and not self._embeds and not self.num_tokens

    def follows(self, tokens: Tokens) -> bool:
        """Return False if these tokens leave a gap after the known ones, or lack log-probabilities or the embedding: a
        fault of the worker."""
        if tokens.index not in self._running:
            return True
        has_logprobs = bool(tokens.logprobs) or not tokens.token_ids or not self._wants_logprobs
        if self._embeds and not tokens.embedding:
            return False
        return has_logprobs and tokens.offset <= len(self._tokens[tokens.index])

    def take(self, tokens: Tokens) -> TokenChunk | None:
        """Append the tokens that are new, and return them, or None if nothing is new. A finish ends the output."""
        if tokens.index not in self._running:
            return None
        generated = self._tokens[tokens.index]
        offset, num_known = len(generated), len(generated) - tokens.offset
        fresh, finish = tokens.token_ids[num_known:], _finish(tokens)
        if not fresh and finish is None:
            return None
        generated += fresh
        self.num_tokens += len(fresh)
        if finish is not None:
            self.end(tokens.index)
        return TokenChunk(
            offset=offset,
            token_ids=fresh,
            finish=finish,
            index=tokens.index,
            logprobs=tokens.logprobs[num_known:],
            prompt_logprobs=self._prompt_logprobs(tokens),
            embedding=tokens.embedding,
        )

    def end(self, index: int) -> None:
        """End an output: `take` drops all later tokens of it."""
        self._running.discard(index)

    def resumed(self) -> bytes:
        """Return the generated tokens, packed, that follow the prompt in the next submit. Only a single sampled output
        has them there."""
        return pack_tokens(self._tokens[0]) if len(self._tokens) == 1 and not self._is_beams else b""

    def continuations(self) -> list[session_pb2.Continuation]:
        """Return the tokens of each running output, for the next submit.

        Return nothing for a single output (see `resumed`) and for beams, which send no tokens before their end. Return
        nothing if a running output has no token yet: then all start again.
        """
        if len(self._tokens) == 1 or self._is_beams or not all(self._tokens[i] for i in self._running):
            return []
        return [
            session_pb2.Continuation(index=index, token_ids=pack_tokens(self._tokens[index]))
            for index in sorted(self._running)
        ]

    @property
    def num_repeated(self) -> int:
        """Return the number of generated tokens that the next submit repeats."""
        return sum(map(len, self._repeated()))

    @property
    def num_computed(self) -> int:
        """Return the number of those tokens that their worker has computed. It computes a token in the step after the
        one that chose it."""
        return sum(max(len(tokens) - 1, 0) for tokens in self._repeated())

    def _repeated(self) -> list[list[int]]:
        if len(self._tokens) == 1:
            return self._tokens
        return [self._tokens[part.index] for part in self.continuations()]

    def submitted(self, continuations: Sequence[session_pb2.Continuation]) -> Set[int]:
        """Return the indexes of the outputs that a worker runs for a submit with these continuations.

        If one running output has no token yet, all outputs start again, even those that have ended.
        """
        if continuations or self._is_beams:
            return self._running
        return set(range(len(self._tokens)))

    def _prompt_logprobs(self, tokens: Tokens) -> Sequence[inference_pb2.TokenLogprob]:
        if tokens.index != 0 or not self.wants_prompt_logprobs:
            return ()
        self.wants_prompt_logprobs = False
        return tokens.prompt_logprobs


def _finish(tokens: Tokens) -> EngineFinish | None:
    if not tokens.finish_reason:
        return None
    is_stop = tokens.finish_reason == inference_pb2.FINISH_REASON_STOP
    return EngineFinish(
        reason=inference_pb2.FINISH_REASON_STOP if is_stop else inference_pb2.FINISH_REASON_LENGTH,
        stop_token=tokens.stop_token,
        cumulative_logprob=tokens.cumulative_logprob,
        beam_score=tokens.beam_score,
    )
