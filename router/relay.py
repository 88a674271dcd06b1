"""One request's way over the workers: submit, take tokens, and again elsewhere if a worker fails it.

A replay sends prompt + tokens so far with the same seed; what comes is joined by token offset, so that no
token is lost or doubled whatever a worker repeats. Yields tokens, never text. Does not own the choice of a
worker (placer.py), nor admission, text and the client's stream (generation.py).
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from blockyard.proto.block_hash import pack_tokens, split_names
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.cluster_view import Placed
from blockyard.router.engine_link import Event, Lost, Refused, Tokens
from blockyard.router.errors import DeadlinePassed, EngineFailed, RequestTooLarge, WorkerLost
from blockyard.router.fleet import Fleet
from blockyard.router.placer import Placer

logger = logging.getLogger(__name__)

MAX_WORKER_DEATHS = 3
"""The quarantine: a request that so many workers died under is given up, because it may be what kills them. Only
deaths of workers that could have had it count."""
LINK_DOWN_SECONDS = 0.01
"""Before another try where a link was down: the view of it follows in a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request with every default filled in and its prompt in tokens and names."""

    request_id: str
    prompt: bytes
    """Token ids as packed little-endian int32."""
    prompt_tokens: int
    block_names: bytes
    """The root's name, then those of the prompt's full blocks, 16 bytes each."""
    sampling: session_pb2.EngineSampling
    deadline: float
    """On the relay's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFinish:
    """The engine ended the output."""

    reason: inference_pb2.FinishReason
    stop_token: int | None
    """An end-of-sequence or stop token that did; it is the last of the output's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """The next tokens, contiguous with those before. The last chunk carries `finish`."""

    offset: int
    token_ids: list[int]
    finish: EngineFinish | None


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a request is; written here, read by whoever reports on it."""

    worker_id: str = ""
    """The worker it is on, or was on last."""
    cached_tokens: int | None = None
    """Prompt tokens reused, as the first worker that answered said."""
    num_generated: int = 0
    num_deaths: int = 0
    is_placed: bool = False


class Relay:
    """One for each router; shared by all its requests."""

    def __init__(self, fleet: Fleet, placer: Placer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._placer = placer
        self._clock = clock

    async def run(self, generation: Generation, progress: Progress) -> AsyncGenerator[TokenChunk, None]:
        """Tokens to the end. Closing the generator cancels the request on its worker at once.

        Raises NoWorkers, WorkerLost (the quarantine), RequestTooLarge, DeadlinePassed, EngineFailed.
        """
        generated: list[int] = []
        names = split_names(generation.block_names)[1:]
        ticket = self._placer.ticket()
        while True:
            placed = await self._placer.place(names, generation.prompt_tokens, ticket)
            with self._submitted(generation, generated, placed, progress) as attempt:
                while (tokens := await attempt.next_tokens(len(generated))) is not None:
                    offset, finish = len(generated), _finish(tokens)
                    fresh = tokens.token_ids[offset - tokens.offset :]
                    generated += fresh
                    if fresh or finish:
                        yield TokenChunk(offset=offset, token_ids=fresh, finish=finish)
                    if finish:
                        return

    @contextmanager
    def _submitted(
        self, generation: Generation, generated: Sequence[int], placed: Placed, progress: Progress
    ) -> Iterator["_Attempt"]:
        link = self._fleet.links[placed.address]
        attempt = _Attempt(self._fleet, placed, progress)
        worker = self._fleet.view.at(placed.address)
        progress.worker_id = worker.worker_id if worker else ""
        progress.is_placed = True
        handle = link.submit(self._submit(generation, generated), attempt.events.put_nowait)
        try:
            yield attempt
        finally:
            progress.is_placed = False
            link.cancel(handle)
            self._fleet.view.ended(placed, busy=attempt.found_busy)

    def _submit(self, generation: Generation, generated: Sequence[int]) -> session_pb2.Submit:
        return session_pb2.Submit(
            request_id=generation.request_id,
            token_ids=generation.prompt + pack_tokens(generated),
            prompt_tokens=generation.prompt_tokens,
            block_names=generation.block_names,
            sampling=generation.sampling,
            deadline_seconds=max(generation.deadline - self._clock(), 0.001),
        )


class _Attempt:
    """One request on one worker."""

    def __init__(self, fleet: Fleet, placed: Placed, progress: Progress) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.found_busy = False
        self._fleet = fleet
        self._placed = placed
        self._progress = progress

    async def next_tokens(self, num_generated: int) -> Tokens | None:
        """What the worker brings next; None where the request must go elsewhere."""
        match await self.events.get():
            case Tokens() as tokens if tokens.offset <= num_generated:
                self._note(tokens)
                return tokens
            case Tokens():
                logger.error("worker %s skipped tokens of a request", self._progress.worker_id)
                self._count_death()
            case Lost(was_sent=True):
                self._count_death()
            case Lost():
                await asyncio.sleep(LINK_DOWN_SECONDS)
            case Refused() as refused:
                self._refused(refused)
        return None

    def _note(self, tokens: Tokens) -> None:
        self._fleet.view.started(self._placed)
        self._progress.num_generated = max(
            self._progress.num_generated, tokens.offset + len(tokens.token_ids)
        )
        if self._progress.cached_tokens is None:
            self._progress.cached_tokens = tokens.cached_tokens

    def _count_death(self) -> None:
        self._progress.num_deaths += 1
        if self._progress.num_deaths >= MAX_WORKER_DEATHS:
            raise WorkerLost(
                f"quarantined: {self._progress.num_deaths} workers died under this request",
                metadata={"tokens_emitted": str(self._progress.num_generated)},
            )

    def _refused(self, refused: Refused) -> None:
        match refused.reason:
            case session_pb2.REJECT_REASON_BUSY | session_pb2.REJECT_REASON_DRAINING:
                self.found_busy = True
            case session_pb2.REJECT_REASON_TOO_LARGE:
                raise RequestTooLarge("prompt and max_tokens can never fit a worker")
            case session_pb2.REJECT_REASON_DEADLINE:
                raise DeadlinePassed("the deadline passed before the output was complete")
            case _:
                raise EngineFailed("the engine failed on this request")


def _finish(tokens: Tokens) -> EngineFinish | None:
    if not tokens.finish_reason:
        return None
    is_stop = tokens.finish_reason == inference_pb2.FINISH_REASON_STOP
    return EngineFinish(
        reason=inference_pb2.FINISH_REASON_STOP if is_stop else inference_pb2.FINISH_REASON_LENGTH,
        stop_token=tokens.stop_token,
    )
