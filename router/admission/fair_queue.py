"""Fair queues: deficit round robin among waiting tenants (Shreedhar & Varghese, SIGCOMM 1995).

Each tenant has a queue, ordered by ticket. A visit to a tenant adds one quantum of tokens, times the tenant's weight,
to its budget. The tenant's requests leave while the budget covers their cost. So waiting tenants receive tokens in
proportion to their weights, whatever the size or number of their requests. A single tenant has one plain queue.

One difference from the paper: a quantum may be smaller than a request. Rounds in which no request can leave are added
up at once. Finding the first request takes at most two passes over the waiting tenants. It takes amortised O(1) while
requests cost at most a quantum.

Pure. Does not own the waiting itself (dispatch/waiting_line.py) or how many requests may wait (ledger.py).
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from blockyard.proto.naming.identifiers import NAME_RULE, is_name

QUANTUM_TOKENS = 1024
"""Budget that one visit adds for a tenant of weight 1. It covers an ordinary request. With smaller values tenants
alternate more often."""
LEAST_HEAP_TICKETS = 16
"""A heap of up to twice this length is never rebuilt, however many of its tickets were removed."""
MIN_WEIGHT = 0.001
MAX_WEIGHT = 1000.0
ADDRESS_SIGN = "@"
"""Prefix of the name that stands for a client without a name: its address. No tenant's name contains it."""


def checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights. Raises ValueError for a wrong name or weight.

    A tenant that is not listed has weight 1. The name "" stands for each client without a tenant.
    """
    for tenant, weight in weights.items():
        if not is_name(tenant):
            raise ValueError(f"a tenant's name must be {NAME_RULE}, not {tenant!r}")
        if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ValueError(
                f"a tenant's weight must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, not {weight:g} for {tenant!r}"
            )
    return dict(weights)


def weight_of(tenant: str, weights: Mapping[str, float]) -> float:
    return weights.get("" if tenant.startswith(ADDRESS_SIGN) else tenant, 1.0)


def parse_weights(pairs: Sequence[str]) -> dict[str, float]:
    """Parse weights given as "name=weight". Raises ValueError with the pair that is wrong."""
    weights: dict[str, float] = {}
    for pair in pairs:
        tenant, _, text = pair.partition("=")
        try:
            weight = float(text)
        except ValueError:
            raise ValueError(f"{pair!r} is not NAME=WEIGHT, such as research=2") from None
        if tenant in weights:
            raise ValueError(f"tenant {tenant!r} has two weights")
        weights[tenant] = weight
    return checked_weights(weights)


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """Position of a request among those of its tenant, and its cost. Lower tickets leave first."""

    rank: float
    """Arrival time, shifted by some seconds per step of priority. No request can therefore wait for ever."""
    number: int
    """Order of arrival. Breaks ties of rank."""
    tenant: str = ""
    cost_tokens: int = 0
    """All prompt tokens, cached or not, plus `max_tokens` for each output or beam.

    Cached tokens are known for one worker at one moment, and generated tokens not at all. A tenant pays for what it
    requests, so a client gains nothing by a false estimate.
    """
    is_paid: bool = False
    """True if the request has left the queue as served, and its tenant has paid its cost."""
    waited_seconds: float = 0.0
    """Total time in line, over all stays."""

    def __lt__(self, other: "Ticket") -> bool:
        return (self.rank, self.number) < (other.rank, other.number)


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant with waiting requests."""

    quantum_tokens: float
    deficit_tokens: float = 0.0
    """Remaining budget. Below 0 after a request that left when another had become the first."""
    is_visited: bool = False
    """True if the quantum of the current visit is already in `deficit_tokens`."""
    is_ahead: bool = False
    """It is in TenantQueues._ahead."""
    waiting: set[Ticket] = field(default_factory=set)
    order: list[Ticket] = field(default_factory=list)
    """A heap of tickets. It drops those that were removed when they reach its top, or when they are most of it."""

    def first(self) -> Ticket | None:
        while self.order and self.order[0] not in self.waiting:
            heapq.heappop(self.order)
        return self.order[0] if self.order else None

    def can_pay(self, ticket: Ticket) -> bool:
        return self.deficit_tokens >= ticket.cost_tokens

    def add(self, ticket: Ticket) -> None:
        self.waiting.add(ticket)
        heapq.heappush(self.order, ticket)

    def remove(self, ticket: Ticket) -> None:
        self.waiting.remove(ticket)
        if len(self.order) > 2 * max(len(self.waiting), LEAST_HEAP_TICKETS):
            self.order = list(self.waiting)
            heapq.heapify(self.order)


class TenantQueues:
    """Waiting requests, by tenant. A tenant without waiting requests is forgotten together with its budget."""

    def __init__(
        self, weights: Mapping[str, float] | None = None, *, quantum_tokens: float = QUANTUM_TOKENS
    ) -> None:
        self._weights = checked_weights(weights or {})
        self._quantum_tokens = quantum_tokens
        self._rotation: OrderedDict[str, _Tenant] = OrderedDict()
        """Tenants by name, in order of visit. The first is being visited."""
        self._ahead: deque[_Tenant] = deque()
        """Tenants with a request that came back. They are visited before the rotation goes on."""

    def __contains__(self, ticket: Ticket) -> bool:
        tenant = self._rotation.get(ticket.tenant)
        return tenant is not None and ticket in tenant.waiting

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._rotation.values())

    def add(self, ticket: Ticket) -> None:
        """Add a request. If it comes back after it has paid, refund its cost and put its tenant ahead of the others."""
        assert ticket not in self, "the request is already in the queue"
        tenant = self._rotation.get(ticket.tenant)
        if tenant is None:
            tenant = _Tenant(self._quantum_tokens * weight_of(ticket.tenant, self._weights))
            self._rotation[ticket.tenant] = tenant
        tenant.add(ticket)
        if ticket.is_paid:
            ticket.is_paid = False
            tenant.deficit_tokens += ticket.cost_tokens
            if not tenant.is_ahead:
                tenant.is_ahead = True
                self._ahead.append(tenant)

    def remove(self, ticket: Ticket, *, was_served: bool) -> None:
        """Remove a request. If it `was_served`, its tenant pays its cost."""
        tenant = self._rotation[ticket.tenant]
        tenant.remove(ticket)
        if was_served:
            ticket.is_paid = True
            tenant.deficit_tokens -= ticket.cost_tokens
        if not tenant.waiting:
            del self._rotation[ticket.tenant]

    def first(self) -> Ticket | None:
        """Return the request that should leave next, or None. It stays the same until a request is added or removed."""
        while self._ahead:
            tenant = self._ahead[0]
            ticket = tenant.first()
            if ticket is not None and tenant.can_pay(ticket):
                return ticket
            tenant.is_ahead = False
            self._ahead.popleft()
        return self._first_in_rotation() if self._rotation else None

    def check_invariants(self) -> None:
        """Raise AssertionError if the state is inconsistent. Takes time in proportion to the number of waiting
        requests."""
        tenants = list(self._rotation.values())
        assert all(tenant.is_ahead for tenant in self._ahead)
        assert not any(tenant.is_visited for tenant in tenants[1:])
        for tenant in tenants:
            assert tenant.waiting, "a tenant without requests"
            assert tenant.waiting <= set(tenant.order)
            gone = len(tenant.order) - len(tenant.waiting)
            assert gone <= max(len(tenant.waiting), 2 * LEAST_HEAP_TICKETS), (
                "too many removed tickets in a heap"
            )

    def _first_in_rotation(self) -> Ticket:
        num_fruitless = 0
        while True:
            name, tenant = next(iter(self._rotation.items()))
            ticket = tenant.first()
            assert ticket is not None, "a tenant without requests"
            if not tenant.is_visited:
                tenant.is_visited = True
                tenant.deficit_tokens += tenant.quantum_tokens
            if tenant.can_pay(ticket):
                return ticket
            tenant.is_visited = False
            self._rotation.move_to_end(name)
            num_fruitless += 1
            if num_fruitless == len(self._rotation):
                self._skip_fruitless_rounds()

    def _skip_fruitless_rounds(self) -> None:
        """Add the quanta of all rounds in which no request could leave. In the round after them one can."""
        tenants = self._rotation.values()
        rounds = min(_visits_needed(tenant) for tenant in tenants) - 1
        for tenant in tenants:
            tenant.deficit_tokens += rounds * tenant.quantum_tokens


def _visits_needed(tenant: _Tenant) -> int:
    ticket = tenant.first()
    assert ticket is not None, "a tenant without requests"
    return max(ceil((ticket.cost_tokens - tenant.deficit_tokens) / tenant.quantum_tokens), 1)
