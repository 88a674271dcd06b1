"""Placer: finds a worker for a request. It looks up the prompt's block names in the index, chooses a worker, books the
request on it, and waits until the worker has room.

Connects the index (prefix_lookup.py), the cluster view (cluster/view.py), the waiting line (waiting_line.py) and the
choice (placement/policies.py). Does not own what happens on the worker afterwards (generation/relay.py).
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from blockyard.router.admission.fair_queue import Ticket
from blockyard.router.cluster.bookings import Choice, Placed
from blockyard.router.cluster.depths import NOTHING_CACHED, usable_cached_tokens
from blockyard.router.cluster.fleet import Fleet, ModelIdentity
from blockyard.router.dispatch.index_report import IndexWatch
from blockyard.router.dispatch.prefix_lookup import LookupResult, PrefixLookup
from blockyard.router.dispatch.waiting_line import WaitingLine
from blockyard.router.errors import DeadlinePassed, DeadlineUnreachable, NoWorkers
from blockyard.router.placement.adapters import Adapter
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.placement.policies import Placement, PlacementRequest, place
from blockyard.router.placement.pulls import Holder, PullOption, PullSource
from blockyard.router.placement.scoring import Candidate, pull_options
from blockyard.router.placement.sessions import SessionMemory

RETRY_AFTER_SECONDS = 1.0
CHANCE_POLICIES = frozenset({"round_robin", "two_choices"})
"""Policies that choose by turn or at random: choosing again would only shuffle waiting requests."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    names: Sequence[bytes]
    tokens: int
    """Tokens of the prompt, and those that a replay adds to it."""
    session_id: str
    policy: PolicyName
    holder: Holder | None = None
    may_split: bool = False
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """Result of a look-up in the index, and its time on the placer's clock."""

    result: LookupResult
    at: float


class _Elsewhere(Exception):
    """Raised for a waiting request that must be placed again: another worker is cheaper now, or this one is not
    ready."""

    def __init__(self, found: _Found) -> None:
        self.found = found


class Placer:
    """Places the requests of one router. `lookup` is None where there is no index.

    A request waits at most `no_worker_seconds` while no worker is ready. Without `pulls` no worker fetches blocks from
    another one.
    """

    def __init__(
        self,
        fleet: Fleet,
        lookup: PrefixLookup | None,
        *,
        policy: PolicyName,
        no_worker_seconds: float,
        pulls: bool = True,
        priority_ageing_seconds: float = 10.0,
        max_queue_seconds: float = inf,
        tenant_weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        config: PlacementConfig | None = None,
    ) -> None:
        self._fleet = fleet
        self.prefix_lookup = lookup
        self.index_watch = IndexWatch(fleet.view, clock, lookup.num_shards if lookup is not None else 1)
        self._policy: PolicyName = policy
        self._pulls = pulls
        self._clock = clock
        self._rng = rng or random.Random()
        self._config = config or PlacementConfig()
        self._sessions = SessionMemory(self._config.remembered_sessions)
        self._no_worker_seconds = no_worker_seconds
        self._priority_ageing_seconds = priority_ageing_seconds
        self._max_queue_seconds = max_queue_seconds
        self._tenant_weights = tenant_weights
        self._line = self._new_line()
        """Requests that wait until any worker is ready, or until the first worker brings the model identity."""
        self._lines: dict[str, WaitingLine] = {}
        """Requests that wait until their worker has room, by worker address. Holds no empty line."""
        self._num_placements = 0
        self._ready_at = clock()
        """When a waiting request last saw a ready worker. At first, when the placer was made."""
        fleet.on_change(self._notify)

    async def identity(self) -> ModelIdentity:
        """Wait for the first accepted worker, and return the model identity that all workers share.

        Raises NoWorkers or Overloaded.
        """
        if self._fleet.identity is not None:
            return self._fleet.identity
        arrival, ticket = self._clock(), self.ticket()
        with self._line.standing(ticket):
            await self._line.reach_head(ticket)
            while self._fleet.identity is None:
                self._check_worker_wait(arrival)
                await self._line.next_change(ticket)
        return self._fleet.identity

    @property
    def moves_preempted(self) -> bool:
        """Whether preempted requests may go on on another worker, which then may fetch their blocks."""
        return self._pulls and self._policy == "prefix"

    def ticket(self, priority: int = 0, *, tenant: str = "", cost_tokens: int = 0) -> Ticket:
        """Return a position in line for `place`. A request that comes back with the same ticket gets its position back.

        Lower priorities go first. Each `priority_ageing_seconds` of waiting make up for one step of priority, as on the
        workers. Tenants alternate by the cost of their requests.
        """
        rank = self._clock() + priority * self._priority_ageing_seconds
        return self._line.ticket(rank, tenant=tenant, cost_tokens=cost_tokens)

    async def place(
        self,
        names: Sequence[bytes],
        prompt_tokens: int,
        ticket: Ticket,
        *,
        session_id: str = "",
        deadline: float = inf,
        policy: PolicyName | None = None,
        holder: Holder | None = None,
        may_split: bool = False,
        adapter: Adapter | None = None,
    ) -> Placed:
        """Choose a worker, book the request on it, and wait until it has room.

        `names` are those of the prompt's full blocks. `prompt_tokens` include the generated tokens that a replay
        repeats. The worker may fetch blocks of both from the `holder`. A request that `may_split` may go to a worker
        that only begins it (`Placed.is_split`). One for an `adapter` goes to a worker that can load it.

        While it waits, its load and its prefix count for the chosen worker. It moves to another worker as soon as that
        is cheaper. Sending it to any worker with room would spread requests with a common prefix just when memory is
        short.

        Raises NoWorkers after `no_worker_seconds` without a ready worker, and Overloaded after `max_queue_seconds` in
        line. Raises NoWorkers at once if workers are ready and none of them can load the adapter. Raises
        DeadlinePassed if the deadline has passed, and DeadlineUnreachable if the first token is expected long after it.
        """
        prompt = _Prompt(names, prompt_tokens, session_id, policy or self._policy, holder, may_split, adapter)
        found = await self._find(names)
        while True:
            placement = self._choose(prompt, found)
            if placement is None:
                if adapter is not None and self._fleet.view.ready():
                    raise NoWorkers("no worker that is ready can load this adapter")
                await self._some_worker(ticket)
                found = await self._find(names)
                continue
            self._refuse_hopeless(placement, prompt, found, deadline - self._clock())
            placed = self._book(placement, prompt, found)
            try:
                await self._room(placed, prompt, found, ticket)
                if self._clock() >= deadline:
                    raise DeadlinePassed("the deadline passed before a worker had room")
                self._send(placed, session_id)
                return placed
            except _Elsewhere as elsewhere:
                self.ended(placed)
                found = elsewhere.found
            except BaseException:
                self.ended(placed)
                raise

    def started(self, placed: Placed, *, cached_tokens: int | None = None) -> None:
        """Record a request's first output, which frees its position in the worker's queue, and wake waiting
        requests."""
        self._fleet.view.started(placed, cached_tokens=cached_tokens)
        self._notify(placed.address)

    def pull_ended(self, placed: Placed) -> None:
        """Record that a request's pull has ended, whether it brought all of its blocks or not."""
        self._fleet.view.pull_ended(placed)

    def draining(self, address: str) -> None:
        """Record that a worker takes no new requests, and wake those that wait for it."""
        self._fleet.view.draining(address)
        self._notify(address)

    def ended(self, placed: Placed, *, busy: bool = False) -> None:
        """Record that a request has left its worker, and wake waiting requests. `busy`: the worker refused it, because
        its queue was full."""
        self._fleet.view.ended(placed, busy=busy)
        self._notify(placed.address)

    async def _some_worker(self, ticket: Ticket) -> None:
        """Wait until a worker is ready. Raises NoWorkers or Overloaded."""
        arrival = self._clock()
        with self._line.standing(ticket):
            await self._line.reach_head(ticket)
            while not self._fleet.view.ready():
                self._check_worker_wait(arrival)
                await self._line.next_change(ticket)
        self._ready_at = self._clock()

    async def _room(self, placed: Placed, prompt: _Prompt, found: _Found, ticket: Ticket) -> None:
        """Wait until the request is first in its worker's line and the worker has room.

        Raises _Elsewhere if it should move to another worker, and Overloaded after the longest wait.
        """
        address = placed.address
        line = self._lines.get(address)
        if line is None:
            if self._fleet.view.has_room(address):
                return
            line = self._lines[address] = self._new_line()
        try:
            with line.standing(ticket):
                await line.reach_head(ticket)
                chosen_at = self._clock()
                while not self._fleet.view.has_room(address):
                    await line.next_change(ticket)
                    is_late = self._clock() - chosen_at >= self._config.reconsider_seconds
                    if is_late or not self._fleet.view.is_ready(address):
                        found = await self._still_the_best(placed, prompt, found)
                        chosen_at = self._clock()
        finally:
            if not line:
                self._lines.pop(address, None)

    async def _still_the_best(self, placed: Placed, prompt: _Prompt, found: _Found) -> _Found:
        """Choose again, after a new look-up if the last one is stale. Return the latest look-up.

        Raises _Elsewhere if the choice is another worker.
        """
        if self._clock() - found.at > self._config.stale_lookup_seconds:
            found = await self._find(prompt.names)
        if prompt.policy in CHANCE_POLICIES and self._fleet.view.is_ready(placed.address):
            return found
        with self._fleet.view.without(placed):
            placement = self._choose(prompt, found)
        if placement is None or (placement.chosen.address, placement.is_split) != (
            placed.address,
            placed.is_split,
        ):
            raise _Elsewhere(found)
        return found

    def _new_line(self) -> WaitingLine:
        return WaitingLine(max_wait_seconds=self._max_queue_seconds, tenant_weights=self._tenant_weights)

    def _notify(self, address: str) -> None:
        """Wake the head of the general line, and that of this worker's line if it may go on."""
        self._line.notify()
        line = self._lines.get(address)
        if line is not None and (
            self._fleet.view.has_room(address) or not self._fleet.view.is_ready(address)
        ):
            line.notify()

    async def explain(
        self,
        names: Sequence[bytes],
        prompt_tokens: int,
        *,
        session_id: str = "",
        adapter: Adapter | None = None,
    ) -> tuple[Placement | None, bool]:
        """Return the placement that a prompt would get now, or None if no worker is ready, and whether the index
        answered."""
        found = await self._find(names)
        prompt = _Prompt(names, prompt_tokens, session_id, self._policy, may_split=True, adapter=adapter)
        return self._choose(prompt, found, scores_all=True), found.result.available

    def pull_options(self, placement: Placement, prompt_tokens: int) -> dict[str, list[PullOption]]:
        """Return the ways to fetch a part of an explained prompt, by the address of the candidate."""
        return {
            candidate.address: pull_options(prompt_tokens, candidate, self._config, placement.sources)
            for candidate in placement.candidates
        }

    async def look_up(self, names: Sequence[bytes]) -> LookupResult:
        if self.prefix_lookup is None:
            return LookupResult(available=False)
        stride_blocks = self._fleet.identity.index_stride_blocks if self._fleet.identity else 1
        return await self.prefix_lookup.lookup(
            names,
            self._fleet.view.incarnations(),
            stride_blocks=stride_blocks,
            is_cut_off=self.index_watch.is_cut_off(self.prefix_lookup.shard_of(names, stride_blocks)),
        )

    async def _find(self, names: Sequence[bytes]) -> _Found:
        return _Found(await self.look_up(names), self._clock())

    def _choose(self, prompt: _Prompt, found: _Found, *, scores_all: bool = False) -> Placement | None:
        """Choose a worker. Unless `scores_all`, policy `prefix` scores only the few that may be the best."""
        result, session_id = found.result, prompt.session_id
        view, block_size = self._fleet.view, self._block_size
        session_worker = self._sessions.last_worker(session_id) if session_id else None
        prefix_key = self._key(prompt.names, 0)
        arrived = view.arrived_depths(prompt.names, block_size)
        seen = prompt.names, prompt.tokens, result.depth_by_worker, arrived
        sources = self._sources(prompt, result)
        if scores_all or prompt.policy != "prefix" or not result.available:
            candidates = view.candidates(*seen, prompt.adapter)
        else:
            key = session_id.encode() or prefix_key or self._rng.randbytes(8)
            candidates = view.shortlist(
                *seen, key=key, favourite=session_worker, sources=sources, adapter=prompt.adapter
            )
        if not candidates:
            return None
        request = PlacementRequest(
            prompt_tokens=prompt.tokens,
            prefix_key=prefix_key,
            fresh_key=self._fresh_key(prompt, candidates),
            index_available=result.available,
            num_placements=self._num_placements,
            session_key=session_id.encode(),
            session_worker=session_worker,
            is_continued=prompt.holder is not None,
        )
        may_split = self._pulls and prompt.may_split and prompt.policy == "prefix"
        beginners = view.beginners(*seen, prompt.adapter) if may_split else []
        return place(request, candidates, prompt.policy, self._rng, self._config, sources, beginners)

    def _sources(self, prompt: _Prompt, result: LookupResult) -> list[PullSource]:
        """Return the workers from which the chosen one may fetch a part of the prompt."""
        if not self._pulls or prompt.policy != "prefix":
            return []
        view = self._fleet.view
        holder = None if prompt.holder is None else view.holding_source(prompt.holder, prompt.tokens)
        cached = view.pull_sources(result.depth_by_worker, prompt.tokens, salt=self._rng.getrandbits(32))
        return cached if holder is None else [holder, *cached]

    def _refuse_hopeless(
        self, placement: Placement, prompt: _Prompt, found: _Found, seconds_left: float
    ) -> None:
        """Raise DeadlineUnreachable if no worker's first token is expected before `hopeless_factor` times the time
        left.

        Refuse nothing until workers have measured steps.
        """
        if not self._fleet.view.speeds.costs.is_measured:
            return
        limit_ms = 1000 * seconds_left * self._config.hopeless_factor
        if _least_ms(placement) > limit_ms > 0:
            # The worker of the least time to the first token need not be on the shortlist.
            among_all = self._choose(prompt, found, scores_all=True)
            if among_all is None or _least_ms(among_all) > limit_ms:
                raise DeadlineUnreachable("the first token is expected long after the deadline")

    def _book(self, placement: Placement, prompt: _Prompt, found: _Found) -> Placed:
        self._num_placements += 1
        chosen = placement.chosen
        assert self._fleet.identity is not None, "a worker was accepted without an identity"
        block_size = self._fleet.identity.block_size
        promised = found.result.depth_by_worker.get(chosen.worker_id, NOTHING_CACHED)
        promised_tokens = usable_cached_tokens(
            promised.blocks + promised.host_blocks, prompt.tokens, block_size
        )
        placed = self._fleet.view.placed(
            chosen.address,
            names=prompt.names,
            prompt_tokens=prompt.tokens,
            uncached_tokens=chosen.uncached_tokens,
            blocks=-(-chosen.needed_tokens // block_size),
            promised_blocks=promised_tokens // block_size,
            pull=chosen.pull,
            is_split=placement.is_split,
            adapter=prompt.adapter.fingerprint if prompt.adapter is not None else "",
        )
        placed.choice = Choice(self._clock(), prompt.policy, chosen, len(placement.considered))
        return placed

    def _send(self, placed: Placed, session_id: str) -> None:
        self._fleet.view.sent(placed)
        worker = self._fleet.view.at(placed.address)
        if session_id and worker is not None:
            self._sessions.served(session_id, worker.worker_id)

    @property
    def _block_size(self) -> int:
        identity = self._fleet.identity
        return identity.block_size if identity is not None else 1

    def _key(self, names: Sequence[bytes], after_blocks: int) -> bytes:
        """Return the name of the prefix that ends `rendezvous_tokens` after this many blocks, or of the whole
        prompt."""
        num_blocks = after_blocks + max(self._config.rendezvous_tokens // self._block_size, 1)
        return names[min(num_blocks, len(names)) - 1] if names else b""

    def _fresh_key(self, prompt: _Prompt, candidates: Sequence[Candidate]) -> bytes:
        """Return what all routers must send to the same worker: an adapter that no candidate has at hand, or the first
        blocks that none has cached."""
        if prompt.adapter is not None and all(candidate.adapter_ms for candidate in candidates):
            return prompt.adapter.fingerprint.encode()
        return self._key(prompt.names, max(c.cached_tokens for c in candidates) // self._block_size)

    def give_up(self) -> None:
        """Wait for no worker any more: a request that finds none ready fails within RECHECK_SECONDS."""
        self._no_worker_seconds = 0.0

    def _check_worker_wait(self, arrival: float) -> None:
        """Raise NoWorkers if no worker has been ready for `no_worker_seconds`, counted from the request's arrival at
        least.

        The time runs for all waiting requests at once, not for one after another.
        """
        now = self._clock()
        if self._fleet.view.ready():
            self._ready_at = now
        if now >= max(arrival, self._ready_at) + self._no_worker_seconds:
            raise NoWorkers("no worker is ready", retry_after_seconds=RETRY_AFTER_SECONDS)


def _least_ms(placement: Placement) -> float:
    """Return the least expected time to the first token among the considered workers, without their decodes."""
    return min(
        score.queue_ms + score.prefill_ms + score.host_load_ms + score.pull_ms
        for score in placement.considered
    )
