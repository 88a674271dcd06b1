"""Relay: runs one request on workers. It submits, takes tokens, and starts again on another worker after a failure.

A replay submits the prompt with the tokens of the unfinished outputs and the same seed. New tokens are joined by offset
(joined_outputs.py). So no token is lost or doubled, whatever a worker repeats. If a worker has given the request back,
because it drains or preempts, the next one may fetch the blocks from it. Passes on tokens, never text. Does not own the
choice of a worker (dispatch/placer.py), what happens on one worker (attempt.py), or admission, text and the client's
stream (generation.py).
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
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.dispatch.placer import Placer
from blockyard.router.errors import NoWorkers, PoisonRequest, WorkerLost
from blockyard.router.generation.attempt import Attempt, Progress, Take
from blockyard.router.generation.joined_outputs import Outputs
from blockyard.router.generation.losses import Losses, Quarantine
from blockyard.router.generation.pulls import Pull, Pulls
from blockyard.router.generation.request_trace import AttemptTrace, RequestTrace
from blockyard.router.placement.config import PolicyName
from blockyard.router.placement.pulls import Holder, PullPlan

logger = logging.getLogger(__name__)

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
    ) -> Iterator[Attempt]:
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
        attempt = Attempt(link, self._placer, placed, progress, key, outputs, take, self.pulls, pull)
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
        self, generation: Generation, progress: Progress, losses: Losses, attempt: Attempt
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
