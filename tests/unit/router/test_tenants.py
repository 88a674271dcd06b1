"""Waiting tenants get tokens by their weights, each in its own order, and none starves."""

from collections import Counter
from itertools import combinations

import pytest
from blockyard.router.admission.fair_queue import (
    QUANTUM_TOKENS,
    TenantQueues,
    Ticket,
    checked_weights,
    parse_weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

QUANTUM = 100
TENANTS = ("a", "b", "c", "d")
weights = st.fixed_dictionaries(
    dict.fromkeys(TENANTS, st.sampled_from([0.001, 0.1, 0.5, 1.0, 2.0, 7.0, 1000.0]))
)
costs = st.lists(st.integers(0, 5 * QUANTUM), min_size=1, max_size=8)


def ticket(number: int, *, tenant: str = "", cost_tokens: int = 1, rank: float = 0.0) -> Ticket:
    return Ticket(rank=rank, number=number, tenant=tenant, cost_tokens=cost_tokens)


def served(queues: TenantQueues) -> Ticket:
    """The first has its turn."""
    first = queues.first()
    assert first is not None
    assert queues.first() is first, "it stays the first until somebody comes or leaves"
    queues.remove(first, was_served=True)
    return first


@settings(deadline=None)
@given(weights, st.fixed_dictionaries(dict.fromkeys(TENANTS, costs)), st.integers(1, 4))
def test_over_any_window_backlogged_tenants_get_tokens_by_their_weights(weight, costs_of, num_tenants):
    """The bound of the paper for two tenants: a quantum and the largest request of each, by weight."""
    tenants = TENANTS[:num_tenants]
    queues, number = TenantQueues(weight, quantum_tokens=QUANTUM), Counter[str]()

    def arrive(tenant: str) -> None:
        of_tenant = costs_of[tenant]
        cost_tokens = of_tenant[number[tenant] % len(of_tenant)]
        number[tenant] += 1
        queues.add(ticket(number[tenant], tenant=tenant, cost_tokens=cost_tokens))

    for tenant in tenants:
        for _ in range(2):
            arrive(tenant)
    shares: list[dict[str, float]] = [dict.fromkeys(tenants, 0.0)]
    for _ in range(60):
        first = served(queues)
        arrive(first.tenant)
        gained = first.cost_tokens / weight[first.tenant]
        shares.append({**shares[-1], first.tenant: shares[-1][first.tenant] + gained})
    for one, other in combinations(tenants, 2):
        largest = max(costs_of[one]) / weight[one] + max(costs_of[other]) / weight[other]
        ahead = [share[one] - share[other] for share in shares]
        assert max(ahead) - min(ahead) <= (QUANTUM + largest) * 1.0001


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1000)), min_size=1, max_size=30))
def test_one_tenant_alone_is_one_queue_in_order_of_tickets(requests: list[tuple[float, int]]) -> None:
    queues = TenantQueues(quantum_tokens=QUANTUM)
    tickets = [
        ticket(number, rank=rank, cost_tokens=cost_tokens)
        for number, (rank, cost_tokens) in enumerate(requests)
    ]
    for one in tickets:
        queues.add(one)
    for bounced in tickets[::3]:
        queues.remove(bounced, was_served=True)
    for bounced in tickets[::3]:
        queues.add(bounced)
    order = [served(queues) for _ in tickets]
    assert [one.number for one in order] == [one.number for one in sorted(tickets)]
    assert queues.first() is None


@settings(deadline=None)
@given(weights, st.integers(1, 10**6))
def test_nobody_waits_longer_than_his_weight_says(weight: dict[str, float], cost_tokens: int) -> None:
    """However large a request is, it goes once the others have had their shares of the rounds that it needs."""
    queues = TenantQueues(weight, quantum_tokens=QUANTUM)
    small_tokens = max(cost_tokens // 10, 1)
    for number, tenant in enumerate(TENANTS[1:]):
        queues.add(ticket(number, tenant=tenant, cost_tokens=small_tokens))
    queues.add(ticket(100, tenant="a", cost_tokens=cost_tokens))
    passed = Counter[str]()
    allowed = {
        tenant: weight[tenant] * (cost_tokens / weight["a"] + 2 * QUANTUM) + small_tokens
        for tenant in TENANTS[1:]
    }
    while sum(passed.values()) < 300:
        first = served(queues)
        if first.tenant == "a":
            break
        passed[first.tenant] += 1
        assert passed[first.tenant] * small_tokens <= allowed[first.tenant]
        queues.add(ticket(101 + sum(passed.values()), tenant=first.tenant, cost_tokens=small_tokens))


def test_who_comes_back_goes_first_and_has_paid_already() -> None:
    queues = TenantQueues(quantum_tokens=QUANTUM)
    for number in range(4):
        for tenant in "abc":
            queues.add(ticket(number, tenant=tenant, cost_tokens=QUANTUM))
    bounced = served(queues)
    assert served(queues).tenant == "b"
    for _ in range(5):
        queues.add(bounced)
        assert served(queues) is bounced
    assert "".join(served(queues).tenant for _ in range(10)) == "cabcabcabc"


def test_a_tenant_cannot_save_up_while_it_is_idle() -> None:
    queues = TenantQueues(quantum_tokens=QUANTUM)
    queues.add(ticket(0, tenant="idle", cost_tokens=1))
    served(queues)
    for number in range(1, 10):
        queues.add(ticket(number, tenant="busy", cost_tokens=QUANTUM))
    served(queues)
    for number in range(10, 20):
        queues.add(ticket(number, tenant="idle", cost_tokens=QUANTUM))
    assert "".join(served(queues).tenant[0] for _ in range(10)) in ("bi" * 5, "ib" * 5)


def test_tiny_weights_and_huge_requests_are_found_without_walking_all_their_rounds() -> None:
    queues = TenantQueues()
    for number in range(3):
        for tenant in "ab":
            queues.add(ticket(number, tenant=tenant, cost_tokens=QUANTUM_TOKENS // 2))
    assert "".join(served(queues).tenant for _ in range(6)) == "aabbab", "a quantum is the default unit"
    queues = TenantQueues({"a": 0.001, "b": 0.001}, quantum_tokens=1)
    for tenant in "ab":
        queues.add(ticket(0, tenant=tenant, cost_tokens=10**9))
    assert {served(queues).tenant, served(queues).tenant} == {"a", "b"}


class QueuesMachine(RuleBasedStateMachine):
    """Arrivals, turns, returns and cancellations of a few tenants in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = TenantQueues({"b": 3.0, "c": 0.2}, quantum_tokens=QUANTUM)
        self.waiting: list[Ticket] = []
        self.gone: list[Ticket] = []
        self.number = 0

    @rule(tenant=st.sampled_from(TENANTS), rank=st.floats(0, 5), cost_tokens=st.integers(0, 1000))
    def arrive(self, tenant: str, rank: float, cost_tokens: int) -> None:
        self.number += 1
        self.waiting.append(ticket(self.number, tenant=tenant, rank=rank, cost_tokens=cost_tokens))
        self.queues.add(self.waiting[-1])

    @precondition(lambda self: self.waiting)
    @rule()
    def serve(self) -> None:
        first = served(self.queues)
        assert first == min(one for one in self.waiting if one.tenant == first.tenant)
        self.waiting.remove(first)
        self.gone.append(first)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0))
    def cancel(self, index: int) -> None:
        leaver = self.waiting.pop(index % len(self.waiting))
        self.queues.remove(leaver, was_served=False)

    @precondition(lambda self: self.gone)
    @rule(index=st.integers(0))
    def come_back(self, index: int) -> None:
        self.waiting.append(self.gone.pop(index % len(self.gone)))
        self.queues.add(self.waiting[-1])

    @invariant()
    def is_consistent(self) -> None:
        self.queues.check_invariants()
        assert len(self.queues) == len(self.waiting)
        assert (self.queues.first() is None) == (not self.waiting)

    def teardown(self) -> None:
        while self.waiting:
            self.serve()
        assert self.queues.first() is None


TestQueues = QueuesMachine.TestCase
TestQueues.settings = settings(deadline=None)


def test_those_who_leave_unserved_take_no_memory() -> None:
    queues = TenantQueues()
    head = ticket(0, rank=-1.0)
    queues.add(head)
    for number in range(1, 10_000):
        leaver = ticket(number, tenant=("", f"t{number}")[number % 2])
        queues.add(leaver)
        queues.remove(leaver, was_served=False)
        queues.check_invariants()
    assert queues.first() is head


def test_weights_as_numbers_and_as_text_are_checked() -> None:
    for weight in (0.0, -1.0, 1e-9, 1e9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="'research'"):
            checked_weights({"research": weight})
    for pairs, told in (
        (["research"], "'research' is not NAME=WEIGHT"),
        (["a=much"], "'a=much' is not NAME=WEIGHT"),
        (["a=1", "a=2"], "'a' has two weights"),
        (["a=0"], "not 0 for 'a'"),
        (["a b=2"], "a tenant's name must be .*, not 'a b'"),
        (["日=2"], "a tenant's name must be .*, not '日'"),
        ([f"{'x' * 129}=2"], "a tenant's name must be .* 128 characters"),
    ):
        with pytest.raises(ValueError, match=told):
            parse_weights(pairs)
    assert parse_weights(["a=2", "=0.5"]) == {"a": 2.0, "": 0.5}
