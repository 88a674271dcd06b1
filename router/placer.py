"""From block names to a worker that takes the request: look up, wait for one's turn, choose, book.

Joins the index (prefix_index.py), beliefs (cluster_view.py), the waiting line (waiting_line.py) and the choice
(placement.py). Does not own what happens on the worker afterwards (relay.py).
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf

from blockyard.router.bookings import Placed
from blockyard.router.cluster_view import NOTHING_CACHED, usable_cached_tokens
from blockyard.router.errors import DeadlinePassed, NoWorkers
from blockyard.router.fleet import Fleet, ModelIdentity
from blockyard.router.placement import Placement, PlacementRequest, place
from blockyard.router.placement_config import PlacementConfig, PolicyName
from blockyard.router.prefix_index import LookupResult, PrefixLookup
from blockyard.router.sessions import SessionMemory
from blockyard.router.tenants import Ticket
from blockyard.router.waiting_line import WaitingLine

RETRY_AFTER_SECONDS = 1.0


class Placer:
    """One for each router. `lookup` None means that there is no index at all; `no_worker_seconds` is how long a
    request waits while no worker is ready."""

    def __init__(
        self,
        fleet: Fleet,
        lookup: PrefixLookup | None,
        *,
        policy: PolicyName,
        no_worker_seconds: float,
        priority_ageing_seconds: float = 10.0,
        max_queue_seconds: float = inf,
        tenant_weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        config: PlacementConfig | None = None,
    ) -> None:
        self._fleet = fleet
        self.prefix_lookup = lookup
        self._policy: PolicyName = policy
        self._clock = clock
        self._rng = rng or random.Random()
        self._config = config or PlacementConfig()
        self._sessions = SessionMemory(self._config.remembered_sessions)
        self._no_worker_seconds = no_worker_seconds
        self._priority_ageing_seconds = priority_ageing_seconds
        self._line = WaitingLine(max_wait_seconds=max_queue_seconds, tenant_weights=tenant_weights)
        self._turn = 0
        self._ready_at = clock()
        """When somebody in line last saw a ready worker."""
        fleet.on_change(self._line.notify)

    async def identity(self) -> ModelIdentity:
        """What workers are here. Raises NoWorkers where none has ever come within the bound, Overloaded."""
        if self._fleet.identity is not None:
            return self._fleet.identity
        arrival, ticket = self._clock(), self.ticket()
        with self._line.standing(ticket):
            await self._line.turn(ticket)
            while self._fleet.identity is None:
                self._check_patience(arrival)
                await self._line.change(ticket)
        return self._fleet.identity

    def ticket(self, priority: int = 0, *, tenant: str = "", cost_tokens: int = 0) -> Ticket:
        """A place in line for `place`; a request that comes back with the same one has lost no time. A lower priority
        goes first, and waiting makes up for it as in the workers. Tenants go in turn, by what their requests cost."""
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
    ) -> Placed:
        """Waits for a worker and books the request on it. Raises NoWorkers after a while without a live one, Overloaded
        after the longest wait in line, DeadlinePassed where it is too late for any worker."""
        arrival = self._clock()
        found, found_at = await self.look_up(names), self._clock()
        with self._line.standing(ticket):
            await self._line.turn(ticket)
            while True:
                placement = self._choose(names, prompt_tokens, found, session_id)
                if placement is None:
                    self._check_patience(arrival)
                    await self._line.change(ticket)
                elif self._clock() - found_at > self._config.stale_lookup_seconds:
                    found, found_at = await self.look_up(names), self._clock()
                elif self._clock() >= deadline:
                    raise DeadlinePassed("the deadline passed before a worker had room")
                else:
                    self._turn += 1
                    self._remember(placement, session_id)
                    return self._book(placement, names, prompt_tokens, found)

    async def explain(
        self, names: Sequence[bytes], prompt_tokens: int, *, session_id: str = ""
    ) -> tuple[Placement | None, bool]:
        """Where a prompt would be placed now, with everybody's terms, and whether the index answered."""
        found = await self.look_up(names)
        placement = self._choose(names, prompt_tokens, found, session_id, respect_gates=False)
        return placement, found.available

    async def look_up(self, names: Sequence[bytes]) -> LookupResult:
        if self.prefix_lookup is None:
            return LookupResult(available=False)
        stride_blocks = self._fleet.identity.index_stride_blocks if self._fleet.identity else 1
        return await self.prefix_lookup.lookup(
            names, self._fleet.view.incarnations(), stride_blocks=stride_blocks
        )

    def _choose(
        self,
        names: Sequence[bytes],
        prompt_tokens: int,
        found: LookupResult,
        session_id: str,
        *,
        respect_gates: bool = True,
    ) -> Placement | None:
        candidates = self._fleet.view.candidates(
            names, prompt_tokens, found.depth_by_worker, respect_gates=respect_gates
        )
        if not candidates:
            return None
        request = PlacementRequest(
            prompt_tokens=prompt_tokens,
            prefix_key=self._prefix_key(names),
            index_available=found.available,
            turn=self._turn,
            session_key=session_id.encode(),
            session_worker=self._sessions.last_worker(session_id) if session_id else None,
        )
        return place(request, candidates, self._policy, self._rng, self._config)

    def _remember(self, placement: Placement, session_id: str) -> None:
        if session_id:
            self._sessions.served(session_id, placement.chosen.worker_id)

    def _book(
        self, placement: Placement, names: Sequence[bytes], prompt_tokens: int, found: LookupResult
    ) -> Placed:
        chosen = placement.chosen
        assert self._fleet.identity is not None, "a worker was accepted without an identity"
        block_size = self._fleet.identity.block_size
        promised = found.depth_by_worker.get(chosen.worker_id, NOTHING_CACHED)
        promised_tokens = usable_cached_tokens(
            promised.blocks + promised.host_blocks, prompt_tokens, block_size
        )
        return self._fleet.view.placed(
            chosen.address,
            names=names,
            uncached_tokens=chosen.uncached_tokens,
            blocks=-(-chosen.needed_tokens // block_size),
            promised_blocks=promised_tokens // block_size,
        )

    def _prefix_key(self, names: Sequence[bytes]) -> bytes:
        if not names or self._fleet.identity is None:
            return b""
        num_blocks = max(self._config.rendezvous_tokens // self._fleet.identity.block_size, 1)
        return names[min(num_blocks, len(names)) - 1]

    def _check_patience(self, arrival: float) -> None:
        """The bound is on the time without a ready worker, which all who stand in line share: they do not pay it
        one after another."""
        now = self._clock()
        if self._fleet.view.ready():
            self._ready_at = now
        if now >= max(arrival, self._ready_at) + self._no_worker_seconds:
            raise NoWorkers("no worker is ready", retry_after_seconds=RETRY_AFTER_SECONDS)
