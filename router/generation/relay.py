"""One request's way over the workers: submit, take tokens, and again elsewhere if a worker fails it.

A replay sends what the unfinished outputs have so far with the same seed; what comes is joined by token offset
(outputs.py), so that no token is lost or doubled whatever a worker repeats. Yields tokens, never text. Does not own
the choice of a worker (dispatch/placer.py), nor admission, text and the client's stream (generation.py).
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

from blockyard.proto.naming.block_hash import NAME_BYTES, split_names
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.events import Event, Lost, Refused, Tokens
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import EngineLink
from blockyard.router.dispatch.placer import Placer
from blockyard.router.errors import (
    DeadlinePassed,
    EngineFailed,
    InvalidRequest,
    PoisonRequest,
    RequestTooLarge,
    WorkerLost,
)
from blockyard.router.generation.losses import Life, Losses, Quarantine
from blockyard.router.generation.outputs import Outputs, TokenChunk
from blockyard.router.placement.config import PolicyName

logger = logging.getLogger(__name__)

LINK_DOWN_SECONDS = 0.01
"""Before another try where a link was down: the view of it follows in a moment."""

SETTLE_SECONDS = 0.05
"""After a worker was lost: one that dies with it is known by then. Sent there meanwhile, a request would be taken for
what killed both."""


APART_SECONDS = 0.5
"""After a step failed: those that were in it come back at times of their own, so that who is to blame is alone."""


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
    priority: int = 0
    """Lower is served earlier."""
    client: str = ""
    """Whose turn it takes, here and where a worker compiles its grammar."""
    cache_account: str = ""
    """On whose share of the workers' caches its blocks go; empty: nobody's in particular."""
    session_id: str = ""
    """The conversation that it belongs to; empty: none."""
    policy: PolicyName | None = None
    """By which it is placed; None: the router's own."""

    @property
    def identity(self) -> bytes:
        """Of the prompt, within those that may share its prefix: another tenant's is another."""
        return self.block_names[:NAME_BYTES] + self.prompt

    @property
    def cost_tokens(self) -> int:
        """What its tenant pays for it: all that it may compute or generate."""
        num_sequences = max(self.sampling.n, self.sampling.beam_width, 1)
        return self.prompt_tokens + self.sampling.max_tokens * num_sequences


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a request is; written here, read by whoever reports on it."""

    worker_id: str = ""
    """The worker it is on, or was on last."""
    cached_tokens: int | None = None
    """Prompt tokens reused, as the first worker that answered said."""
    num_generated: int = 0
    """Tokens, of all outputs together."""
    num_migrations: int = 0
    """How often its worker was lost."""
    is_placed: bool = False
    sent_at: float | None = None
    """When a worker was first sent it, on the relay's clock."""


class Relay:
    """One for each router; shared by all its requests. `max_migrations`: how many workers a request may lose and still
    go on."""

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        *,
        max_migrations: int,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._max_migrations = max_migrations
        self._clock = clock
        self._quarantine = Quarantine(clock)
        self._rng = rng or random.Random()
        self.num_migrations = 0
        self.num_lost = 0
        """Requests given up because their budget of migrations was used."""
        self.num_quarantined = 0
        """Requests given up because workers died under them."""

    async def run(
        self, generation: Generation, progress: Progress, stopped: Container[int] = ()
    ) -> AsyncGenerator[TokenChunk, None]:
        """Tokens to the end of the last output. Closing the generator cancels the request on its worker at once.

        An output whose index the caller has put into `stopped` by the time he asks for more has ended for him: it is
        cancelled, and the others go on. Raises InvalidRequest (a grammar), NoWorkers, WorkerLost (the budget of
        migrations is used), PoisonRequest, RequestTooLarge, DeadlinePassed, EngineFailed.
        """
        self._quarantine.check(generation.identity)
        losses = Losses(max_migrations=self._max_migrations)
        outputs = Outputs(generation.sampling)
        names = split_names(generation.block_names)[1:]
        ticket = self._placer.ticket(
            generation.priority, tenant=generation.client, cost_tokens=generation.cost_tokens
        )
        while outputs.running:
            # A prompt whose log-probabilities are wanted is computed whole: no cache serves it.
            reusable = [] if outputs.wants_prompt_logprobs else names
            placed = await self._placer.place(
                reusable,
                generation.prompt_tokens,
                ticket,
                session_id=generation.session_id,
                deadline=generation.deadline,
                policy=generation.policy,
            )
            with self._submitted(generation, outputs, placed, progress) as attempt:
                while outputs.running and (tokens := await attempt.next_tokens(outputs)) is not None:
                    chunk = outputs.take(tokens)
                    if chunk is None:
                        continue
                    progress.num_generated = outputs.num_tokens
                    yield chunk
                    if chunk.index in stopped:
                        outputs.end(chunk.index)
                        attempt.cancel(chunk.index)
            if attempt.was_lost:
                self._count_loss(generation, progress, losses, attempt)
                await asyncio.sleep(SETTLE_SECONDS)
            elif attempt.has_failed:
                losses.add_failure(brought_tokens=attempt.brought_tokens)
                progress.num_migrations = losses.num
                self.num_migrations += 1
                await asyncio.sleep(self._rng.uniform(0, APART_SECONDS))

    @contextmanager
    def _submitted(
        self, generation: Generation, outputs: Outputs, placed: Placed, progress: Progress
    ) -> Iterator["_Attempt"]:
        worker = self._fleet.view.at(placed.address)
        progress.worker_id = worker.worker_id if worker else ""
        progress.is_placed = True
        progress.sent_at = self._clock() if progress.sent_at is None else progress.sent_at
        life = (placed.address, worker.incarnation if worker else "")
        attempt = _Attempt(self._fleet.links[placed.address], self._placer, placed, progress, life)
        attempt.submit(self._submit(generation, outputs), outputs)
        try:
            yield attempt
        finally:
            progress.is_placed = False
            attempt.cancel()
            self._placer.ended(placed, busy=attempt.found_busy)

    def _count_loss(
        self, generation: Generation, progress: Progress, losses: Losses, attempt: "_Attempt"
    ) -> None:
        """Raises PoisonRequest, WorkerLost."""
        try:
            losses.add(
                attempt.life,
                is_suspicious=attempt.saw_death and not attempt.brought_tokens,
                is_alive=self._fleet.view.is_alive,
                tokens_emitted=progress.num_generated,
            )
        except PoisonRequest:
            self.num_quarantined += 1
            self._quarantine.add(generation.identity)
            raise
        except WorkerLost:
            self.num_lost += 1
            raise
        progress.num_migrations = losses.num
        self.num_migrations += 1

    def _submit(self, generation: Generation, outputs: Outputs) -> session_pb2.Submit:
        submit = session_pb2.Submit(
            request_id=generation.request_id,
            token_ids=generation.prompt + outputs.resumed(),
            prompt_tokens=generation.prompt_tokens,
            block_names=generation.block_names,
            sampling=generation.sampling,
            deadline_seconds=max(generation.deadline - self._clock(), 0.001),
            continuations=outputs.continuations(),
            priority=generation.priority,
            tenant=tenant_key(generation.cache_account),
            client=tenant_key(generation.client),
        )
        if not outputs.wants_prompt_logprobs:
            submit.sampling.ClearField("prompt_logprobs")
        return submit


def tenant_key(tenant: str) -> int:
    """What stands for a tenant on workers, who need no names. 0 is nobody in particular."""
    return int.from_bytes(sha256(tenant.encode()).digest()[:8]) | 1 if tenant else 0


class _Attempt:
    """One request on one worker."""

    def __init__(
        self, link: EngineLink, placer: Placer, placed: Placed, progress: Progress, life: Life
    ) -> None:
        self.life = life
        self.found_busy = False
        self.was_lost = False
        self.saw_death = False
        self.has_failed = False
        self.brought_tokens = False
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._link, self._placer = link, placer
        self._handle = 0
        self._placed = placed
        self._progress = progress

    def submit(self, submit: session_pb2.Submit, outputs: Outputs) -> None:
        submitted = outputs.submitted(submit.continuations)
        self._handle = self._link.submit(submit, self._events.put_nowait, submitted)
        for index in submitted - outputs.running:
            self.cancel(index)

    def cancel(self, index: int | None = None) -> None:
        """All that still runs, or one output of it."""
        self._link.cancel(self._handle, index)

    async def next_tokens(self, outputs: Outputs) -> Tokens | None:
        """What the worker brings next; None where the request must go elsewhere."""
        match await self._events.get():
            case Tokens() as tokens if outputs.follows(tokens):
                self._note(tokens)
                return tokens
            case Tokens():
                logger.error("worker %s left out a part of a request", self._progress.worker_id)
                self.was_lost = True
            case Lost(was_sent=True, is_death=is_death):
                self.was_lost, self.saw_death = True, is_death
            case Lost():
                await asyncio.sleep(LINK_DOWN_SECONDS)
            case Refused() as refused:
                self._refused(refused)
        return None

    def _note(self, tokens: Tokens) -> None:
        self.brought_tokens = True
        self._placer.started(self._placed, cached_tokens=tokens.cached_tokens)
        if self._progress.cached_tokens is None:
            self._progress.cached_tokens = tokens.cached_tokens

    def _refused(self, refused: Refused) -> None:
        match refused.reason:
            case session_pb2.REJECT_REASON_BUSY:
                self.found_busy = True
            case session_pb2.REJECT_REASON_DRAINING:
                self._placer.draining(self._placed.address)
            case session_pb2.REJECT_REASON_INTERNAL:
                self.has_failed = True
            case session_pb2.REJECT_REASON_TOO_LARGE:
                raise RequestTooLarge(
                    "prompt, max_tokens and outputs or beams can never fit a worker together"
                )
            case session_pb2.REJECT_REASON_DEADLINE:
                raise DeadlinePassed("the deadline passed before the output was complete")
            case session_pb2.REJECT_REASON_GRAMMAR:
                raise InvalidRequest.of(
                    "sampling.structured_output",
                    refused.detail or "cannot be compiled, or not within the server's limits",
                )
            case session_pb2.REJECT_REASON_NO_CHOICE:
                raise InvalidRequest.of(
                    "sampling.structured_output",
                    "leaves no token to choose, together with the lists of tokens",
                )
            case _:
                raise EngineFailed("the engine failed on this request")
