"""Relay: runs one request on workers. It submits, takes tokens, and starts again on another worker after a failure.

A replay submits the prompt with the tokens of the unfinished outputs and the same seed. New tokens are joined by offset
(joined_outputs.py). So no token is lost or doubled, whatever a worker repeats. If a worker has given the request back,
because it drains or preempts, the next one may fetch the blocks from it. Passes on tokens, never text. Does not own the
choice of a worker (dispatch/placer.py), or admission, text and the client's stream (generation.py).

Tokens go to the caller in the callback of the link that read them. A switch of tasks would cost as much as the token's
text.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

from blockyard.proto.index.contract import Incarnation
from blockyard.proto.naming.block_hash import NAME_BYTES, split_names
from blockyard.proto.v1 import session_pb2
from blockyard.router.adapters.keeper import AdapterKeeper
from blockyard.router.adapters.registry import RegisteredAdapter
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.events import Event, Lost, PhaseEnded, Pulled, Refused, Tokens
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import EngineLink
from blockyard.router.dispatch.placer import Placer
from blockyard.router.errors import (
    DeadlinePassed,
    EngineFailed,
    InvalidRequest,
    NoWorkers,
    PoisonRequest,
    RequestTooLarge,
    WorkerLost,
)
from blockyard.router.generation.joined_outputs import Outputs, TokenChunk
from blockyard.router.generation.losses import Losses, Quarantine, WorkerKey
from blockyard.router.generation.pulls import Pull, Pulls
from blockyard.router.generation.request_trace import AttemptEnd, AttemptTrace, RequestTrace
from blockyard.router.placement.config import PolicyName
from blockyard.router.placement.pulls import Holder, PullPlan

logger = logging.getLogger(__name__)

LINK_DOWN_SECONDS = 0.01
"""Wait before the next placement if a link was down. The cluster view learns of it in that time."""

LOST_WORKER_SECONDS = 0.05
"""Wait before the next placement after a lost worker. A second worker that dies at the same time is known by then.

A request that went to the second worker would be blamed for both deaths.
"""


MAX_PREEMPTIONS = 4
"""How often workers may preempt one request and give it back. Then it stays where it is."""

MAX_BROUGHT = 8
"""How often workers may be told to read the adapter of one request."""

FAILURE_JITTER_SECONDS = 0.5
"""Longest wait after a failed step. The wait is random, so that the request at fault ends up in a batch of its own."""

Take = Callable[[TokenChunk], bool]
"""Takes the next tokens of an output. Returns True to end that output. Must not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request with all defaults filled in, its prompt as tokens, and its block names."""

    request_id: str
    prompt: bytes
    """Token ids as packed little-endian int32."""
    prompt_tokens: int
    block_names: bytes
    """The root's name, then those of the prompt's full blocks, 16 bytes each."""
    sampling: session_pb2.EngineSampling
    deadline: float
    """Time on the relay's clock by which the request must end."""
    priority: int = 0
    """Lower values are served earlier."""
    client: str = ""
    """Key of the client's queue in this router's lines, and on a worker that compiles its grammar."""
    cache_account: str = ""
    """Tenant whose share of the workers' caches holds its blocks. Empty: no tenant."""
    session_id: str = ""
    """Id of the request's conversation. Empty: none."""
    policy: PolicyName | None = None
    """Placement policy of the request. None: the router's own."""
    expected_pause_seconds: float = 0.0
    """Time from its end until its session is expected to come back. 0: unknown."""
    adapter: RegisteredAdapter | None = None
    """None: the bare model."""

    @property
    def identity(self) -> bytes:
        """Return the root's name and the prompt, by which a poison is known. Tenants that share no prefixes differ in
        it."""
        return self.block_names[:NAME_BYTES] + self.prompt

    @property
    def cost_tokens(self) -> int:
        """Return the cost that the tenant pays in line: the prompt's tokens, and `max_tokens` for each output or
        beam."""
        num_sequences = max(self.sampling.n, self.sampling.beam_width, 1)
        return self.prompt_tokens + self.sampling.max_tokens * num_sequences


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of a request. The relay writes it. Metrics, ListRequests and the Finish message read it."""

    worker_id: str = ""
    """Id of the worker that has the request, or had it last."""
    cached_tokens: int | None = None
    """Reused prompt tokens, as reported by the first worker that answered."""
    num_generated: int = 0
    """Generated tokens of all outputs together."""
    num_migrations: int = 0
    """How often its worker was lost, or a step failed, and the request went on."""
    num_preemptions: int = 0
    """How often a worker preempted it and gave it back."""
    is_placed: bool = False
    sent_at: float | None = None
    """When it was first sent to a worker, on the relay's clock."""
    pull: Pull | None = None
    """Its last pull. None: no worker was to fetch blocks for it."""
    trace: RequestTrace | None = None
    """None: the request is not traced."""


class Relay:
    """Runs the requests of one router. A request survives at most `max_migrations` lost workers and failed steps."""

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        *,
        max_migrations: int,
        adapters: AdapterKeeper | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._adapters = adapters or AdapterKeeper(fleet)
        self._max_migrations = max_migrations
        self._clock = clock
        self._quarantine = Quarantine(clock)
        self._rng = rng or random.Random()
        self.pulls = Pulls(clock)
        self.num_migrations = 0
        """Lost workers and failed steps after which a request was placed again."""
        self.num_splits = 0
        """Requests that one worker began and gave back for another one to continue, as their placement had planned."""
        self.num_lost = 0
        """Requests that ended with WorkerLost, because they had used all their migrations."""
        self.num_quarantined = 0
        """Requests given up because two workers died under them."""

    async def run(self, generation: Generation, progress: Progress, take: Take) -> None:
        """Place a request, submit it, and pass its tokens to `take` until the last output ends. Place it again after
        each failure.

        Cancelling the call cancels the request on its worker at once. An output that `take` ends is cancelled there,
        and the others continue.

        Raises InvalidRequest (a bad grammar, or no token left to choose), NoWorkers, Overloaded, PoisonRequest,
        WorkerLost (all migrations used), RequestTooLarge, DeadlinePassed or EngineFailed. Raises
        what `take` raises.
        """
        self._quarantine.check(generation.identity)
        losses = Losses(max_migrations=self._max_migrations)
        outputs = Outputs(generation.sampling)
        names = split_names(generation.block_names)[1:]
        holder: Holder | None = None
        adapter, num_brought = generation.adapter, 0
        ticket = self._placer.ticket(
            generation.priority, tenant=generation.client, cost_tokens=generation.cost_tokens
        )
        while outputs.running:
            # Prompt log-probabilities need the whole prompt to be computed, so no cached block is usable.
            reusable = [] if outputs.wants_prompt_logprobs else names
            if progress.trace is not None:
                progress.trace.placing_at = self._clock()
            placed = await self._placer.place(
                reusable,
                generation.prompt_tokens + outputs.num_repeated,
                ticket,
                session_id=generation.session_id,
                deadline=generation.deadline,
                policy=generation.policy,
                holder=holder,
                may_split=outputs.may_split,
                adapter=None if adapter is None else adapter.to_place,
            )
            with self._submitted(generation, outputs, placed, progress, take) as attempt:
                await attempt.until_over()
            if attempt.was_handed_over:
                address, incarnation = attempt.worker
                computed_tokens = generation.prompt_tokens + outputs.num_computed
                holder = Holder(address, Incarnation(incarnation), computed_tokens)
                self.num_splits += attempt.was_split
            progress.num_preemptions += attempt.was_preempted
            if attempt.was_lost:
                self._count_loss(generation, progress, losses, attempt)
                await asyncio.sleep(LOST_WORKER_SECONDS)
            elif attempt.has_failed:
                losses.add_failure(brought_tokens=attempt.brought_tokens)
                progress.num_migrations = losses.num
                self.num_migrations += 1
                await asyncio.sleep(self._rng.uniform(0, FAILURE_JITTER_SECONDS))
            elif attempt.lacked_adapter and adapter is not None:
                num_brought += 1
                if num_brought > MAX_BROUGHT:
                    raise NoWorkers("workers do not keep the adapter of this request")
                await self._adapters.bring(placed.address, adapter)

    @contextmanager
    def _submitted(
        self, generation: Generation, outputs: Outputs, placed: Placed, progress: Progress, take: Take
    ) -> Iterator["_Attempt"]:
        worker = self._fleet.view.at(placed.address)
        progress.worker_id = worker.worker_id if worker else ""
        progress.is_placed = True
        progress.sent_at = self._clock() if progress.sent_at is None else progress.sent_at
        key = (placed.address, worker.incarnation if worker else "")
        link = self._fleet.links[placed.address]
        pull = (
            self.pulls.begin(generation.request_id, progress.worker_id, placed.pull) if placed.pull else None
        )
        progress.pull = pull or progress.pull
        attempt = _Attempt(link, self._placer, placed, progress, key, outputs, take, self.pulls, pull)
        submit = self._submit(generation, outputs, placed)
        if self._placer.moves_preempted and progress.num_preemptions < MAX_PREEMPTIONS:
            submit.preemptions = progress.num_preemptions
        if progress.trace is not None:
            attempt.trace = self._traced(progress.trace, progress, placed, key[1], pull)
            submit.wants_phases = True
        attempt.submit(submit)
        try:
            yield attempt
        finally:
            progress.is_placed = False
            attempt.cancel()
            self.pulls.end(pull)
            self._placer.ended(placed, busy=attempt.found_busy)
            if attempt.trace is not None:
                attempt.trace.over(self._clock(), attempt.end_of_trace, progress.num_generated)

    def _traced(
        self, trace: RequestTrace, progress: Progress, placed: Placed, incarnation: str, pull: Pull | None
    ) -> AttemptTrace:
        now = self._clock()
        attempt = AttemptTrace(
            placing_at=now if trace.placing_at is None else trace.placing_at,
            placed=placed,
            worker_id=progress.worker_id,
            incarnation=incarnation,
            sent_at=now,
            pull=pull,
            tokens_before=progress.num_generated,
            clock=self._clock,
        )
        trace.placing_at = None
        trace.attempts.append(attempt)
        return attempt

    def _count_loss(
        self, generation: Generation, progress: Progress, losses: Losses, attempt: "_Attempt"
    ) -> None:
        """Count a lost worker. Raises WorkerLost, or PoisonRequest after a quarantine of the prompt, if no further
        worker may get the request."""
        try:
            losses.add(
                attempt.worker,
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

    def _submit(self, generation: Generation, outputs: Outputs, placed: Placed) -> session_pb2.Submit:
        pull = placed.pull
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
            pull=None if pull is None else _pull_message(pull),
            hands_over=placed.is_split,
            expected_pause_seconds=generation.expected_pause_seconds,
            lora_name=generation.adapter.name if generation.adapter is not None else "",
            lora_fingerprint=generation.adapter.fingerprint if generation.adapter is not None else "",
        )
        if not outputs.wants_prompt_logprobs:
            submit.sampling.ClearField("prompt_logprobs")
        return submit


def _pull_message(pull: PullPlan) -> session_pb2.Pull:
    return session_pb2.Pull(
        address=pull.source.transfer_address,
        incarnation=pull.source.incarnation,
        num_blocks=pull.num_blocks,
        seconds=pull.patience_seconds,
    )


def tenant_key(tenant: str) -> int:
    """Return the 64-bit number that stands for a tenant's or client's name on workers. 0: no name."""
    return int.from_bytes(sha256(tenant.encode()).digest()[:8]) | 1 if tenant else 0


class _Attempt:
    """One submit of a request to one worker, until it ends there."""

    def __init__(
        self,
        link: EngineLink,
        placer: Placer,
        placed: Placed,
        progress: Progress,
        worker: WorkerKey,
        outputs: Outputs,
        take: Take,
        pulls: Pulls,
        pull: Pull | None,
    ) -> None:
        self.worker = worker
        self.found_busy = False
        self.was_lost = False
        self.saw_death = False
        self.has_failed = False
        self.was_preempted = False
        self.was_drained = False
        self.was_handed_over = False
        """True if the worker gave the request back in the middle, and still has its blocks."""
        self.was_split = False
        """True if it did so because its placement was a split."""
        self.brought_tokens = False
        self.lacked_adapter = False
        self.trace: AttemptTrace | None = None
        self._end: asyncio.Future[Event | Exception | None] = asyncio.get_running_loop().create_future()
        """Why the attempt is over. None if no output runs any more."""
        self._link, self._placer = link, placer
        self._handle = 0
        self._may_move = False
        self._placed = placed
        self._progress = progress
        self._outputs, self._take = outputs, take
        self._pulls, self._pull = pulls, pull

    def submit(self, submit: session_pb2.Submit) -> None:
        self._may_move = submit.HasField("preemptions")
        submitted = self._outputs.submitted(submit.continuations)
        self._handle = self._placed.handle = self._link.submit(submit, self._receive, submitted)
        for index in submitted - self._outputs.running:
            self.cancel(index)

    def cancel(self, index: int | None = None) -> None:
        """Cancel the whole request, or one output of it."""
        self._link.cancel(self._handle, index)

    @property
    def end_of_trace(self) -> AttemptEnd:
        if self.was_lost:
            return "lost"
        if self.has_failed:
            return "failed"
        if self.was_preempted:
            return "preempted"
        if self.was_split:
            return "split"
        if self.was_drained:
            return "draining"
        if self.lacked_adapter:
            return "no adapter"
        if self.found_busy:
            return "busy"
        if not self._outputs.running:
            return "finished"
        is_down = self._end.done() and not self._end.cancelled() and isinstance(self._end.result(), Lost)
        return "unreachable" if is_down else "stopped"

    async def until_over(self) -> None:
        """Wait until no output runs here any more. Note the cause if the others must be placed again.

        Raises a RouterError if the worker refused the request for good, or what the request's `take` raised.
        """
        match await self._end:
            case Tokens():
                logger.error(
                    "worker %s sent tokens that do not follow the earlier ones", self._progress.worker_id
                )
                self.was_lost = True
            case Lost(was_sent=True, is_death=is_death):
                self.was_lost, self.saw_death = True, is_death
            case Lost():
                await asyncio.sleep(LINK_DOWN_SECONDS)
            case Refused() as refused:
                self._refused(refused)
            case Exception() as error:
                raise error
            case None:
                pass

    def _receive(self, event: Event) -> None:
        """Take an event, called by the link that read it. So a failure must end this request alone."""
        if self._end.done():
            return
        match event:
            case Tokens():
                try:
                    if not self._outputs.follows(event):
                        self._end.set_result(event)
                        return
                    self._pass_on(event)
                except Exception as error:
                    self._end.set_result(error)
                    return
                if not self._outputs.running:
                    self._end.set_result(None)
            case Pulled():
                self._placer.pull_ended(self._placed)
                self._pulls.end(self._pull, event.report)
            case PhaseEnded():
                if self.trace is not None:
                    self.trace.hear(event.phase)
            case _:
                self._end.set_result(event)

    def _pass_on(self, tokens: Tokens) -> None:
        if not self.brought_tokens:
            self._note_first(tokens)
        chunk = self._outputs.take(tokens)
        if chunk is None:
            return
        self._progress.num_generated = self._outputs.num_tokens
        if self._take(chunk):
            self._outputs.end(chunk.index)
            self.cancel(chunk.index)

    def _note_first(self, tokens: Tokens) -> None:
        self.brought_tokens = True
        if self.trace is not None:
            self.trace.note_first_token()
        self._pulls.answered(self._pull)
        self._placer.started(self._placed, cached_tokens=tokens.cached_tokens)
        if self._progress.cached_tokens is None:
            self._progress.cached_tokens = tokens.cached_tokens

    def _refused(self, refused: Refused) -> None:
        match refused.reason:
            case session_pb2.REJECT_REASON_BUSY:
                self.found_busy = True
            case session_pb2.REJECT_REASON_DRAINING:
                self.was_drained = True
                self.was_handed_over = self.brought_tokens
                self._placer.draining(self._placed.address)
            case session_pb2.REJECT_REASON_PREEMPTED if self._may_move:
                self.was_preempted, self.was_handed_over = True, self.brought_tokens
            case session_pb2.REJECT_REASON_HANDED_OVER:
                self.was_handed_over = self.was_split = self.brought_tokens
                self.has_failed = not self.brought_tokens
            case session_pb2.REJECT_REASON_INTERNAL:
                self.has_failed = True
            case session_pb2.REJECT_REASON_ADAPTER:
                self.lacked_adapter = True
            case session_pb2.REJECT_REASON_TOO_LARGE:
                raise RequestTooLarge(
                    "prompt and max_tokens, for all outputs or beams, can never fit a worker"
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
