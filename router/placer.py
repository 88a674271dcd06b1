"""From block names to a worker that takes the request: look up, wait for one's turn, choose, book.

Joins the index (prefix_index.py), beliefs (cluster_view.py), the waiting line (waiting_line.py) and the choice
(placement.py). Does not own what happens on the worker afterwards (relay.py).
"""

import random
import time
from collections.abc import Callable, Sequence

from blockyard.router.cluster_view import Placed
from blockyard.router.errors import NoWorkers
from blockyard.router.fleet import Fleet, ModelIdentity
from blockyard.router.placement import Placement, PlacementRequest, place
from blockyard.router.placement_config import PlacementConfig, PolicyName
from blockyard.router.prefix_index import LookupResult, PrefixLookup
from blockyard.router.waiting_line import Ticket, WaitingLine

STALE_LOOKUP_SECONDS = 1.0
"""What the index said before a longer wait in line is asked again."""
RENDEZVOUS_TOKENS = 64
"""Without the index, prompts that agree in so many tokens are kept together."""
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
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        weights: PlacementConfig | None = None,
    ) -> None:
        self._fleet = fleet
        self._lookup = lookup
        self._policy: PolicyName = policy
        self._clock = clock
        self._rng = rng or random.Random()
        self._weights = weights
        self._no_worker_seconds = no_worker_seconds
        self._priority_ageing_seconds = priority_ageing_seconds
        self._line = WaitingLine()
        self._turn = 0
        self._ready_at = clock()
        """When somebody in line last saw a ready worker."""
        self.index_available = lookup is not None
        """By the last look-up."""
        fleet.on_change(self._line.notify)

    async def identity(self) -> ModelIdentity:
        """What workers are here. Raises NoWorkers where none has ever come within the bound."""
        arrival, ticket = self._clock(), self.ticket()
        with self._line.standing(ticket):
            await self._line.turn(ticket)
            while self._fleet.identity is None:
                self._check_patience(arrival)
                await self._line.change(ticket)
        return self._fleet.identity

    def ticket(self, priority: int = 0) -> Ticket:
        """A place in line for `place`; a request that comes back with the same one has lost no time. A lower priority
        goes first, and waiting makes up for it as in the workers."""
        return self._line.ticket(self._clock() + priority * self._priority_ageing_seconds)

    async def place(self, names: Sequence[bytes], prompt_tokens: int, ticket: Ticket) -> Placed:
        """Waits for a worker and books the request on it. Raises NoWorkers after a while without a live one."""
        arrival = self._clock()
        found, found_at = await self.look_up(names), self._clock()
        with self._line.standing(ticket):
            await self._line.turn(ticket)
            while True:
                placement = self._choose(names, prompt_tokens, found, respect_gates=True)
                if placement is None:
                    self._check_patience(arrival)
                    await self._line.change(ticket)
                elif self._clock() - found_at > STALE_LOOKUP_SECONDS:
                    found, found_at = await self.look_up(names), self._clock()
                else:
                    self._turn += 1
                    return self._book(placement, names)

    async def explain(self, names: Sequence[bytes], prompt_tokens: int) -> tuple[Placement | None, bool]:
        """Where a prompt would be placed now, with everybody's terms, and whether the index answered."""
        found = await self.look_up(names)
        return self._choose(names, prompt_tokens, found, respect_gates=False), found.available

    async def look_up(self, names: Sequence[bytes]) -> LookupResult:
        if self._lookup is None:
            return LookupResult(available=False)
        found = await self._lookup.lookup(names, self._fleet.view.incarnations())
        self.index_available = found.available
        return found

    def _choose(
        self, names: Sequence[bytes], prompt_tokens: int, found: LookupResult, *, respect_gates: bool
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
        )
        return place(request, candidates, self._policy, self._rng, self._weights)

    def _book(self, placement: Placement, names: Sequence[bytes]) -> Placed:
        chosen = placement.chosen
        assert self._fleet.identity is not None, "a worker was accepted without an identity"
        return self._fleet.view.placed(
            chosen.address,
            names=names,
            uncached_tokens=chosen.uncached_tokens,
            blocks=-(-chosen.needed_tokens // self._fleet.identity.block_size),
        )

    def _prefix_key(self, names: Sequence[bytes]) -> bytes:
        if not names or self._fleet.identity is None:
            return b""
        num_blocks = max(RENDEZVOUS_TOKENS // self._fleet.identity.block_size, 1)
        return names[min(num_blocks, len(names)) - 1]

    def _check_patience(self, arrival: float) -> None:
        """The bound is on the time without a ready worker, which all who stand in line share: they do not pay it
        one after another."""
        now = self._clock()
        if self._fleet.view.ready():
            self._ready_at = now
        if now >= max(arrival, self._ready_at) + self._no_worker_seconds:
            raise NoWorkers("no worker is ready", retry_after_seconds=RETRY_AFTER_SECONDS)
