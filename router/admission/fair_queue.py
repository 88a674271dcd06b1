"""Whose turn it is among tenants that wait: deficit round robin (Shreedhar & Varghese, SIGCOMM 1995).

Each tenant has a queue of its own, in order of tickets. Tenants are visited in turn; a visit adds a quantum of tokens
times the tenant's weight to what it may spend, and its requests go as long as that covers their cost. So all who wait
get tokens in proportion to their weights, whatever the sizes and the numbers of their requests. With one tenant
this is one queue in order of tickets.

Departing from the paper, a quantum may be smaller than a request: rounds in which nobody could go are added up at
once, so that finding the first costs two walks over the waiting tenants at most, and O(1) amortised while requests cost
no more than a quantum.

Pure. Does not own the waiting itself (dispatch/waiting_line.py) nor how many may wait (ledger.py).
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from blockyard.proto.naming.identifiers import NAME_RULE, is_name

QUANTUM_TOKENS = 1024
"""What a tenant of weight 1 may spend at a visit: an ordinary request. Smaller ones take turns more finely."""
LEAST_HEAP_TICKETS = 16
"""Below twice so many a queue is not tidied."""
MIN_WEIGHT = 0.001
MAX_WEIGHT = 1000.0
ADDRESS_SIGN = "@"
"""Begins what stands for a client without a name, an address: no name has it."""


def checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Shares by tenant; who is not named has 1, and "" is each address that names no tenant. Raises ValueError."""
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
    """Weights given as "name=weight". Raises ValueError that says what is wrong with which."""
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
    """A request's place among those of its tenant; lower ones go first."""

    rank: float
    """The time of arrival, later by some seconds for each step of priority: nobody who waits is passed for ever."""
    number: int
    """Decides between equals: the order of arrival."""
    tenant: str = ""
    cost_tokens: int = 0
    """Its prompt, cached or not, and `max_tokens` for each output. What is cached is known only for one worker and one
    moment, and what will be generated not at all: a tenant pays for what it asks for, so that no guess can be gamed."""
    is_paid: bool = False
    """It had its turn."""
    waited_seconds: float = 0.0
    """In line, over all the times that it stood there."""

    def __lt__(self, other: "Ticket") -> bool:
        return (self.rank, self.number) < (other.rank, other.number)


@dataclass(slots=True, eq=False)
class _Tenant:
    """One that has waiting requests."""

    quantum_tokens: float
    deficit_tokens: float = 0.0
    """What it may spend; below 0 where a request went that was no longer the first."""
    is_visited: bool = False
    """This visit's quantum is in the deficit."""
    is_ahead: bool = False
    waiting: set[Ticket] = field(default_factory=set)
    order: list[Ticket] = field(default_factory=list)
    """A heap; those who left are dropped when they come to its top, or when they are most of it."""

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
    """Those who wait. A tenant without any is forgotten, with what it could have spent."""

    def __init__(
        self, weights: Mapping[str, float] | None = None, *, quantum_tokens: float = QUANTUM_TOKENS
    ) -> None:
        self._weights = checked_weights(weights or {})
        self._quantum_tokens = quantum_tokens
        self._rotation: OrderedDict[str, _Tenant] = OrderedDict()
        """By name: the one that is visited, then those that follow."""
        self._ahead: deque[_Tenant] = deque()
        """Those with a request that came back: it is looked at before the rotation goes on."""

    def __contains__(self, ticket: Ticket) -> bool:
        tenant = self._rotation.get(ticket.tenant)
        return tenant is not None and ticket in tenant.waiting

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._rotation.values())

    def add(self, ticket: Ticket) -> None:
        """A request that comes back after its turn has its cost returned and goes ahead of other tenants."""
        assert ticket not in self, "a request stands in line once"
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

    def remove(self, ticket: Ticket, *, had_turn: bool) -> None:
        """It goes on and pays, or leaves without."""
        tenant = self._rotation[ticket.tenant]
        tenant.remove(ticket)
        if had_turn:
            ticket.is_paid = True
            tenant.deficit_tokens -= ticket.cost_tokens
        if not tenant.waiting:
            del self._rotation[ticket.tenant]

    def first(self) -> Ticket | None:
        """Whose turn it is; the same one until somebody comes or leaves."""
        while self._ahead:
            tenant = self._ahead[0]
            ticket = tenant.first()
            if ticket is not None and tenant.can_pay(ticket):
                return ticket
            tenant.is_ahead = False
            self._ahead.popleft()
        return self._first_in_rotation() if self._rotation else None

    def check_invariants(self) -> None:
        """Raises AssertionError. Takes time in proportion to all who wait."""
        tenants = list(self._rotation.values())
        assert all(tenant.is_ahead for tenant in self._ahead)
        assert not any(tenant.is_visited for tenant in tenants[1:])
        for tenant in tenants:
            assert tenant.waiting, "a tenant without requests"
            assert tenant.waiting <= set(tenant.order)
            gone = len(tenant.order) - len(tenant.waiting)
            assert gone <= max(len(tenant.waiting), 2 * LEAST_HEAP_TICKETS), "a queue of those who left"

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
        """All the rounds that pass before somebody can go, but for the last one."""
        tenants = self._rotation.values()
        rounds = min(_visits_needed(tenant) for tenant in tenants) - 1
        for tenant in tenants:
            tenant.deficit_tokens += rounds * tenant.quantum_tokens


def _visits_needed(tenant: _Tenant) -> int:
    ticket = tenant.first()
    assert ticket is not None, "a tenant without requests"
    return max(ceil((ticket.cost_tokens - tenant.deficit_tokens) / tenant.quantum_tokens), 1)
