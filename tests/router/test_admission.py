"""What is charged is given back exactly, no limit is ever passed, and no tenant keeps others out for good."""

from contextlib import ExitStack
from itertools import pairwise
from random import Random

import pytest
from blockyard.router.admission import (
    MAX_REFUSED_TENANTS,
    REFUSED_ACTIVE_SECONDS,
    AdmissionLedger,
    Charge,
    estimate_tokens,
)
from blockyard.router.errors import Overloaded
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
    """How many of so many attempts came in; they stay as long as the stack."""
    num_admitted = 0
    for _ in range(attempts):
        try:
            stack.enter_context(ledger.charge(1, tenant=tenant))
        except Overloaded:
            continue
        num_admitted += 1
    return num_admitted


def test_requests_beyond_the_limit_are_told_when_to_come_back() -> None:
    ledger = ledger_of(max_requests=2)
    with ledger.charge(1), ledger.charge(1):
        with pytest.raises(Overloaded) as refused, ledger.charge(1):
            pass
        assert refused.value.retry_after_seconds is not None
        assert ledger.requests == 2
    with ledger.charge(1):
        assert (ledger.requests, ledger.tokens) == (1, 1)


def test_outputs_count_as_requests() -> None:
    ledger = ledger_of(max_requests=4)
    with ledger.charge(1, outputs=3):
        with pytest.raises(Overloaded), ledger.charge(1, outputs=2):
            pass
        with ledger.charge(1, outputs=1):
            assert ledger.requests == 4


def test_tokens_are_a_limit_of_their_own() -> None:
    ledger = ledger_of(max_tokens=1000)
    with ledger.charge(900):
        with pytest.raises(Overloaded), ledger.charge(101):
            pass
        with ledger.charge(100):
            assert ledger.tokens == 1000
    assert ledger.tokens == 0


def test_a_corrected_charge_counts_as_corrected_and_is_given_back_so() -> None:
    ledger = ledger_of(max_tokens=1000)
    with ledger.charge(100) as charge:
        charge.correct(1200)
        assert ledger.tokens == 1200, "what is known counts, also beyond the limit"
        with pytest.raises(Overloaded), ledger.charge(1):
            pass
        charge.correct(40)
        with ledger.charge(960):
            assert ledger.tokens == 1000
    assert ledger.tokens == 0


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


def test_shares_follow_the_weights_of_both_limits() -> None:
    ledger = ledger_of(max_requests=90, max_tokens=900, big=2.0)
    with ExitStack() as stack:
        assert admitted(ledger, stack, "small") + admitted(ledger, stack, "big") == 2
        assert admitted(ledger, stack, "big", attempts=200) == 59
        assert admitted(ledger, stack, "small", attempts=200) == 29
    with ExitStack() as stack:
        stack.enter_context(ledger.charge(1, tenant="small"))
        stack.enter_context(ledger.charge(599, tenant="big"))
        with pytest.raises(Overloaded):
            stack.enter_context(ledger.charge(2, tenant="big"))
        stack.enter_context(ledger.charge(1, tenant="big"))
        stack.enter_context(ledger.charge(299, tenant="small"))


def test_a_tenant_that_holds_nothing_is_let_in_whatever_its_share() -> None:
    ledger = ledger_of(max_requests=100, max_tokens=1000)
    with ExitStack() as stack:
        for number in range(50):
            assert admitted(ledger, stack, f"t{number}") == 1
        stack.enter_context(ledger.charge(500, outputs=16, tenant="large"))
        assert admitted(ledger, stack, "large") == 0


def test_a_refused_tenant_counts_for_a_minute_and_is_then_forgotten() -> None:
    clock = Clock()
    ledger = ledger_of(max_requests=2, clock=clock)
    with ExitStack() as early, ExitStack() as late:
        admitted(ledger, early, "a")
        admitted(ledger, late, "a")
        assert admitted(ledger, late, "b") == 0
        early.close()
        assert admitted(ledger, late, "a") == 0
        clock.now += REFUSED_ACTIVE_SECONDS
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


def test_the_refused_of_one_tenant_return_one_after_another_and_another_tenants_do_not_queue_behind_them() -> (
    None
):
    clock = Clock()
    ledger = ledger_of(max_requests=10, clock=clock)

    def delay(tenant: str) -> float:
        with pytest.raises(Overloaded) as refused, ledger.charge(1, tenant=tenant):
            pass
        assert refused.value.retry_after_seconds is not None
        return refused.value.retry_after_seconds

    with ExitStack() as stack:
        assert admitted(ledger, stack, "a", attempts=10) == 10
        delays = [delay("a") for _ in range(100)]
        assert delays[0] < 1.0
        assert all(later > earlier * 0.7 for earlier, later in pairwise(delays))
        assert delays[40] > 10 * delays[0]
        assert max(delays) <= 30.0
        assert delay("b") < 1.0


LIMITS = (12, 100)
WEIGHTS = {"a": 1, "b": 2, "c": 1}


class LedgerMachine(RuleBasedStateMachine):
    """Random charges, corrections and ends of three tenants, beside a plain account of them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger = ledger_of(max_requests=LIMITS[0], max_tokens=LIMITS[1], clock=self.clock, b=2.0)
        self.held: list[tuple[ExitStack, Charge, str]] = []
        self.refused_at: dict[str, float] = {}

    def sums(self, tenant: str | None = None) -> tuple[int, int]:
        charges = [charge for _, charge, owner in self.held if tenant in (None, owner)]
        return sum(charge.outputs for charge in charges), sum(charge.tokens for charge in charges)

    def may_enter(self, tenant: str, outputs: int, tokens: int) -> bool:
        if not self.held:
            return True
        since = self.clock.now - REFUSED_ACTIVE_SECONDS
        active = {owner for _, _, owner in self.held} | {tenant}
        active |= {name for name, at in self.refused_at.items() if at > since}
        units = sum(WEIGHTS[name] for name in active)
        own, everybody = self.sums(tenant), self.sums()
        for index, (limit, asked) in enumerate(zip(LIMITS, (outputs, tokens), strict=True)):
            if everybody[index] + asked > limit:
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
        self.refused_at[tenant] = self.clock.now

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
