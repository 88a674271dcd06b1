"""Charges are returned exactly, no limit is ever exceeded, and no tenant keeps others out for ever."""

from contextlib import ExitStack
from itertools import pairwise
from random import Random

import pytest
from blockyard.router.admission.ledger import (
    MAX_REFUSED_TENANTS,
    RETURN_GRACE_SECONDS,
    AdmissionLedger,
    Charge,
    estimate_tokens,
)
from blockyard.router.errors import Overloaded
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.properties import examples

from .prompt import Clock

MANY = 10**6


def ledger_of(
    *, max_requests: int = MANY, max_tokens: int = MANY, clock: Clock | None = None, **weights: float
) -> AdmissionLedger:
    return AdmissionLedger(
        max_requests=max_requests,
        max_tokens=max_tokens,
        tenant_weights=weights,
        clock=clock or Clock(),
        rng=Random(0),
    )


def admitted(ledger: AdmissionLedger, stack: ExitStack, tenant: str, *, attempts: int = 1) -> int:
    """Return how many of the attempts were admitted. They stay as long as the stack."""
    num_admitted = 0
    for _ in range(attempts):
        try:
            stack.enter_context(ledger.charge(1, tenant=tenant))
        except Overloaded:
            continue
        num_admitted += 1
    return num_admitted


def filled(ledger: AdmissionLedger, stack: ExitStack, tenant: str, limit: int) -> int:
    """A tenant takes what it may, and a guest what is not for it."""
    own = admitted(ledger, stack, tenant, attempts=2 * limit)
    return own + admitted(ledger, stack, "guest", attempts=limit // 16 if own == limit - limit // 16 else 0)


def refusal(ledger: AdmissionLedger, tokens: int = 1, *, outputs: int = 1, tenant: str = "") -> Overloaded:
    with pytest.raises(Overloaded) as refused, ledger.charge(tokens, outputs=outputs, tenant=tenant):
        pass
    return refused.value


def test_clients_known_by_address_have_shares_of_the_weight_of_those_without_a_name() -> None:
    ledger = AdmissionLedger(max_requests=30, max_tokens=MANY, tenant_weights={"": 2.0}, clock=Clock())
    with ExitStack() as stack:
        assert admitted(ledger, stack, "@10.0.0.1") + admitted(ledger, stack, "named") == 2
        assert admitted(ledger, stack, "@10.0.0.1", attempts=40) == 19
        assert admitted(ledger, stack, "named", attempts=40) == 9


def test_a_request_above_the_token_limit_runs_alone_rather_than_never() -> None:
    ledger = ledger_of(max_tokens=10)
    with ledger.charge(50), pytest.raises(Overloaded), ledger.charge(1):
        pass
    assert ledger.tokens == 0


def test_the_estimate_is_never_nothing_and_grows_with_the_text() -> None:
    assert estimate_tokens(0) == 1
    assert 900 <= estimate_tokens(4000) <= 1100


def test_alone_a_tenant_may_take_all_and_gives_way_as_soon_as_another_was_refused() -> None:
    ledger = ledger_of(max_requests=10)
    with ExitStack() as early, ExitStack() as late:
        assert admitted(ledger, early, "flood", attempts=6) == 6
        assert admitted(ledger, late, "flood", attempts=20) == 4
        assert admitted(ledger, late, "small") == 0, "nobody is sent away for another"
        early.close()
        assert admitted(ledger, late, "flood", attempts=20) == 1, "its share is 5, of which it had 4"
        assert admitted(ledger, late, "small", attempts=20) == 5
    assert (ledger.requests, ledger.tokens) == (0, 0)


def test_a_refused_tenant_counts_until_it_should_have_come_back_and_is_then_forgotten() -> None:
    clock = Clock()
    ledger = ledger_of(max_requests=2, clock=clock)
    with ExitStack() as early, ExitStack() as late:
        admitted(ledger, early, "a")
        admitted(ledger, late, "a")
        told = refusal(ledger, tenant="b").retry_after_seconds
        early.close()
        assert told is not None
        clock.now += told + RETURN_GRACE_SECONDS - 0.001
        assert admitted(ledger, late, "a") == 0
        clock.now += 0.001
        # a was itself refused just now, but refusals of its own cost it nothing.
        assert admitted(ledger, late, "a") == 1
        assert ledger.active_tenants == 1


def test_refused_names_do_not_pile_up() -> None:
    ledger = ledger_of(max_requests=1)
    with ExitStack() as stack:
        admitted(ledger, stack, "a")
        for number in range(2 * MAX_REFUSED_TENANTS):
            assert admitted(ledger, stack, f"stranger-{number}") == 0
        assert ledger.active_tenants <= MAX_REFUSED_TENANTS + 2


def test_the_refused_of_one_tenant_return_one_after_another_and_nobody_elses_behind_them() -> None:
    clock = Clock()
    ledger = ledger_of(max_requests=10, clock=clock)

    def delay(tenant: str) -> float:
        return refusal(ledger, tenant=tenant).retry_after_seconds or 0.0

    with ExitStack() as stack:
        assert admitted(ledger, stack, "a", attempts=10) == 10
        delays = [delay("a") for _ in range(100)]
        assert delays[0] < 1.0
        assert all(later > earlier * 0.7 for earlier, later in pairwise(delays))
        assert delays[40] > 10 * delays[0]
        assert max(delays) <= 30.0
        assert delay("b") < 1.0


@examples(40, deadline=None)
@given(
    st.integers(2, 64),
    st.lists(st.sampled_from([0.01, 1.0, 1000.0]), min_size=1, max_size=40),
    st.floats(0, 60),
    st.booleans(),
)
def test_what_the_refused_keep_free_is_half_of_a_limit_at_most_and_each_of_them_finds_room(
    limit: int, weights: list[float], seconds: float, by_tokens: bool
) -> None:
    """However many names were refused, of whatever weights, while one tenant held all."""
    clock = Clock()
    names = {f"t{number}": weight for number, weight in enumerate(weights)}
    limits = {"max_tokens": limit} if by_tokens else {"max_requests": limit}
    ledger = ledger_of(clock=clock, **limits, **names)
    with ExitStack() as first, ExitStack() as later:
        assert filled(ledger, first, "flood", limit) == limit
        assert not any(admitted(ledger, later, name) for name in names)
        first.close()
        clock.now += seconds
        kept = limit - admitted(ledger, later, "flood", attempts=2 * limit)
        assert kept <= (limit + 1) // 2
        assert kept or seconds > RETURN_GRACE_SECONDS
        assert all(admitted(ledger, later, name) for name in list(names)[:kept])


def test_a_tenant_that_was_refused_often_finds_room_at_the_last_time_that_it_was_told() -> None:
    clock = Clock()
    ledger = ledger_of(max_requests=10, clock=clock)
    with ExitStack() as early, ExitStack() as late:
        assert admitted(ledger, early, "flood", attempts=10) == 10
        told = [refusal(ledger, tenant="small").retry_after_seconds or 0.0 for _ in range(200)]
        assert told[-1] > told[0] + 2 * RETURN_GRACE_SECONDS
        early.close()
        for _ in range(10):
            clock.now += told[-1] / 10
            admitted(ledger, late, "flood", attempts=20)
        assert admitted(ledger, late, "small", attempts=20) == 5


def test_made_up_names_that_were_refused_do_not_take_an_empty_router_from_its_tenant() -> None:
    clock = Clock()
    ledger = ledger_of(max_requests=1024, clock=clock)
    with ExitStack() as early, ExitStack() as late:
        assert filled(ledger, early, "own", 1024) == 1024
        for number in range(MAX_REFUSED_TENANTS):
            assert admitted(ledger, early, f"x{number}") == 0
        early.close()
        clock.now += 1.0
        assert admitted(ledger, late, "own", attempts=1024) == 512
        clock.now += 40.0
        assert admitted(ledger, late, "own", attempts=1024) == 960 - 512, "nobody came back"


def test_a_refusal_names_the_limit_and_when_to_come_back() -> None:
    ledger = ledger_of(max_requests=2, max_tokens=50)
    with ledger.charge(40), ledger.charge(1):
        by_requests = refusal(ledger)
    with ledger.charge(40):
        by_tokens = refusal(ledger, 11)
    for refused, limit in ((by_requests, "2 requests"), (by_tokens, "50 prompt tokens")):
        assert f"limit of {limit} (max_" in str(refused)
        assert f"come back in {refused.retry_after_seconds:.1f} s" in str(refused)
    ledger = ledger_of(max_requests=4)
    with ledger.charge(1, tenant="a"), ledger.charge(1, tenant="a"), ledger.charge(1, tenant="b"):
        assert "share of 2 of the limit of 4 requests" in str(refusal(ledger, tenant="a"))


def test_a_request_above_a_limit_is_told_so_and_to_come_back_when_those_that_run_are_gone() -> None:
    for limits, tokens, outputs in (({"max_tokens": 1000}, 5000, 1), ({"max_requests": 4}, 1, 16)):
        ledger = ledger_of(**limits)
        with ledger.charge(1):
            refused = refusal(ledger, tokens, outputs=outputs)
            assert "runs only when no other does" in str(refused)
            assert refused.retry_after_seconds is not None
            assert refused.retry_after_seconds < 2.0, "one request is held for a second, so far as is known"
        with ledger.charge(tokens, outputs=outputs):
            pass


LIMITS = (12, 100)
WEIGHTS = {"a": 1, "b": 2, "c": 1}


class LedgerMachine(RuleBasedStateMachine):
    """Random charges, corrections and ends of three tenants, beside a plain account of them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger = ledger_of(max_requests=LIMITS[0], max_tokens=LIMITS[1], clock=self.clock, b=2.0)
        self.held: list[tuple[ExitStack, Charge, str]] = []
        self.expected_until: dict[str, float] = {}

    def sums(self, tenant: str | None = None) -> tuple[int, int]:
        charges = [charge for _, charge, owner in self.held if tenant in (None, owner)]
        return sum(charge.outputs for charge in charges), sum(charge.tokens for charge in charges)

    def may_enter(self, tenant: str, outputs: int, tokens: int) -> bool:
        if not self.held:
            return True
        holding = {owner for _, _, owner in self.held}
        returning = {name for name, until in self.expected_until.items() if until > self.clock.now} - holding
        holding_units, returning_units = (
            sum(WEIGHTS[name] for name in names) for names in (holding, returning)
        )
        units = holding_units + min(returning_units, holding_units)
        own, everybody = self.sums(tenant), self.sums()
        for index, (limit, asked) in enumerate(zip(LIMITS, (outputs, tokens), strict=True)):
            if everybody[index] + asked > limit - (limit // 16 if holding == {tenant} else 0):
                return False
            if own[0] and own[index] + asked > limit * WEIGHTS[tenant] // units:
                return False
        return True

    @rule(tenant=st.sampled_from("abc"), outputs=st.integers(1, 4), tokens=st.integers(1, 60))
    def charge(self, tenant: str, outputs: int, tokens: int) -> None:
        stack, charging = ExitStack(), self.ledger.charge(tokens, outputs=outputs, tenant=tenant)
        if self.may_enter(tenant, outputs, tokens):
            self.held.append((stack, stack.enter_context(charging), tenant))
            return
        with pytest.raises(Overloaded) as refused:
            stack.enter_context(charging)
        assert refused.value.retry_after_seconds is not None
        assert 0.1 <= refused.value.retry_after_seconds <= 30.0
        until = self.clock.now + refused.value.retry_after_seconds + RETURN_GRACE_SECONDS
        self.expected_until[tenant] = max(until, self.expected_until.get(tenant, 0.0))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0), tokens=st.integers(0, 80))
    def correct(self, index: int, tokens: int) -> None:
        self.held[index % len(self.held)][1].correct(tokens)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0))
    def end(self, index: int) -> None:
        stack, _, _ = self.held.pop(index % len(self.held))
        stack.close()

    @rule(seconds=st.floats(0, 70))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def is_exact(self) -> None:
        assert (self.ledger.requests, self.ledger.tokens) == self.sums()
        assert self.ledger.requests <= LIMITS[0]

    def teardown(self) -> None:
        for stack, _, _ in self.held:
            stack.close()
        assert (self.ledger.requests, self.ledger.tokens) == (0, 0)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(deadline=None)


@settings(deadline=None)
@given(st.lists(st.integers(1, 500), max_size=20), st.integers(0, 19))
def test_failures_release_exactly_what_was_charged(charges: list[int], fails_at: int) -> None:
    ledger = ledger_of(max_requests=8, max_tokens=1500)

    def nest(rest: list[int], depth: int) -> None:
        if not rest or depth == fails_at:
            raise KeyError
        with ledger.charge(rest[0]):
            assert ledger.requests <= 8
            nest(rest[1:], depth + 1)

    with pytest.raises((KeyError, Overloaded)):
        nest(charges, 0)
    assert (ledger.requests, ledger.tokens) == (0, 0)
