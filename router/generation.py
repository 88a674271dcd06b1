"""A request from its message to its last delta: check, admit, tokenise, relay, turn into text.

Joins the other parts in that order and owns nothing of them. Does not own gRPC (service.py) nor the client's
pace (output.py).
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from blockyard.proto.v1 import inference_pb2
from blockyard.router.admission import AdmissionLedger
from blockyard.router.errors import DeadlinePassed, InternalError, InvalidRequest
from blockyard.router.fleet import Fleet, ModelIdentity
from blockyard.router.model_facts import ModelFacts
from blockyard.router.output import Delta, Piece, TextOutput
from blockyard.router.placer import Placer
from blockyard.router.relay import Generation, Relay, TokenChunk
from blockyard.router.requests import RequestRecord, RequestRegistry
from blockyard.router.sampling import SamplingRequest
from blockyard.router.tokenizing import (
    Prepared,
    PromptError,
    PromptInput,
    TokenizerService,
    TokenizingError,
    TokenizingTimeout,
)
from blockyard.router.validation import ValidGeneration, check_context, valid_generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """What the services of one router share."""

    facts: ModelFacts
    cluster_secret: str
    tokenizing: TokenizerService
    fleet: Fleet
    placer: Placer
    relay: Relay
    ledger: AdmissionLedger
    registry: RequestRegistry
    clock: Callable[[], float] = time.monotonic

    @property
    def max_model_len(self) -> int:
        """What the workers serve; before any came, what the model allows."""
        identity = self.fleet.identity
        return identity.max_model_len if identity else self.facts.max_position_embeddings

    def root(self, identity: ModelIdentity, salt: str) -> bytes:
        return identity.root(cluster_secret=self.cluster_secret, salt=salt)


async def tokenise(
    tokenizing: TokenizerService, prompt: PromptInput, *, root: bytes | None, block_size: int
) -> Prepared:
    """Token ids and names, with the tokeniser's failures as answers to the client."""
    try:
        return await tokenizing.prepare(prompt, root=root, block_size=block_size)
    except PromptError as error:
        raise InvalidRequest.of("input", str(error)) from None
    except TokenizingTimeout:
        raise DeadlinePassed("input: tokenising takes too long") from None
    except TokenizingError:
        raise InternalError("the tokeniser failed") from None


def admit(parts: RouterParts, message: inference_pb2.GenerateRequest) -> ValidGeneration:
    """Raises InvalidRequest, ContextLengthExceeded, UnknownModel."""
    return valid_generation(message, parts.facts, max_model_len=parts.max_model_len)


async def generate(
    parts: RouterParts, valid: ValidGeneration, record: RequestRecord, *, deadline: float
) -> AsyncGenerator[Delta, None]:
    """The output in pieces; `deadline` is on the parts' clock. Closing it ends the request everywhere.

    Raises any RouterError.
    """
    identity = await parts.placer.identity()
    prepared = await tokenise(
        parts.tokenizing,
        valid.prompt,
        root=parts.root(identity, valid.cache_salt),
        block_size=identity.block_size,
    )
    check_context(prepared.num_tokens, identity.max_model_len)
    record.prompt_tokens = prepared.num_tokens
    room_tokens = identity.max_model_len - prepared.num_tokens
    generation = Generation(
        request_id=valid.request_id,
        prompt=prepared.token_ids,
        prompt_tokens=prepared.num_tokens,
        block_names=prepared.block_names,
        sampling=valid.sampling.for_engine(room_tokens=room_tokens, facts=parts.facts),
        deadline=deadline,
    )
    assembly = _Assembly(parts, valid.sampling, record)
    async with aclosing(parts.relay.run(generation, record.progress)) as chunks:
        async for chunk in chunks:
            delta = assembly.delta(chunk)
            yield delta
            if delta.finish is not None:
                return


class _Assembly:
    """Turns one request's chunks into deltas and keeps the figures of its last one."""

    def __init__(self, parts: RouterParts, sampling: SamplingRequest, record: RequestRecord) -> None:
        self._clock = parts.clock
        self._sampling = sampling
        self._record = record
        self._text = TextOutput(
            parts.tokenizing.tokenizer, stop=sampling.stop, min_tokens=sampling.min_tokens
        )
        self._num_tokens = 0
        self._first_token_at: float | None = None

    def delta(self, chunk: TokenChunk) -> Delta:
        if self._first_token_at is None:
            self._first_token_at = self._clock()
        finish = chunk.finish
        piece = self._text.push(
            chunk.token_ids,
            is_last=finish is not None,
            has_stop_token=finish is not None and finish.stop_token is not None,
        )
        self._num_tokens += len(piece.token_ids)
        return Delta(
            text=piece.text,
            token_ids=piece.token_ids,
            token_offset=chunk.offset,
            finish=self._finish(chunk, piece),
        )

    def _finish(self, chunk: TokenChunk, piece: Piece) -> inference_pb2.Finish | None:
        if piece.stop is None and chunk.finish is None:
            return None
        reason, stop_reason = inference_pb2.FINISH_REASON_STOP, piece.stop
        if piece.stop is None and chunk.finish is not None:
            reason = chunk.finish.reason
            # An end-of-sequence token is the model's own way to stop and names no reason.
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
        )
