"""What is charged is given back exactly; a busy worker is asked no more often than it has places."""

import pytest
from blockyard.router.admission import (
    OFFERED_PLACES,
    PROBE_SECONDS,
    AdmissionLedger,
    WorkerGate,
    estimate_tokens,
)
from blockyard.router.errors import Overloaded
from hypothesis import given
from hypothesis import strategies as st


def test_requests_beyond_the_limit_are_told_when_to_come_back() -> None:
    ledger = AdmissionLedger(max_requests=2, max_tokens=1000)
    with ledger.charge(1), ledger.charge(1):
        with pytest.raises(Overloaded) as refused, ledger.charge(1):
            pass
        assert refused.value.retry_after_seconds is not None
        assert ledger.requests == 2
    with ledger.charge(1):
        assert (ledger.requests, ledger.tokens) == (1, 1)


def test_tokens_are_a_limit_of_their_own() -> None:
    ledger = AdmissionLedger(max_requests=100, max_tokens=1000)
    with ledger.charge(900):
        with pytest.raises(Overloaded), ledger.charge(101):
            pass
        with ledger.charge(100):
            assert ledger.tokens == 1000
    assert ledger.tokens == 0


def test_a_request_above_the_token_limit_runs_alone_rather_than_never() -> None:
    ledger = AdmissionLedger(max_requests=100, max_tokens=10)
    with ledger.charge(50), pytest.raises(Overloaded), ledger.charge(1):
        pass
    assert ledger.tokens == 0


@given(st.lists(st.integers(1, 500), max_size=20), st.integers(0, 19))
def test_failures_release_exactly_what_was_charged(charges: list[int], fails_at: int) -> None:
    ledger = AdmissionLedger(max_requests=8, max_tokens=1500)

    def nest(rest: list[int], depth: int) -> None:
        if not rest or depth == fails_at:
            raise KeyError
        with ledger.charge(rest[0]):
            assert ledger.requests <= 8
            nest(rest[1:], depth + 1)

    with pytest.raises((KeyError, Overloaded)):
        nest(charges, 0)
    assert (ledger.requests, ledger.tokens) == (0, 0)


def test_the_estimate_is_never_nothing_and_grows_with_the_text() -> None:
    assert estimate_tokens(0) == 1
    assert 900 <= estimate_tokens(4000) <= 1100


def test_a_shut_gate_lets_one_through_for_each_place_and_opens_when_nobody_waits() -> None:
    gate = WorkerGate()
    gate.shut(0.0)
    assert not gate.admits(0.0)
    gate.freed_one()
    gate.freed_one()
    gate.took_one(0.0)
    assert gate.admits(0.0)
    gate.took_one(0.0)
    assert not gate.admits(0.0)
    assert gate.admits(PROBE_SECONDS), "a probe comes due by time"
    gate.took_one(PROBE_SECONDS)
    gate.nobody_waits(PROBE_SECONDS / 2)
    assert not gate.admits(PROBE_SECONDS), "a report older than the BUSY opens nothing"
    gate.nobody_waits(PROBE_SECONDS)
    assert gate.admits(PROBE_SECONDS)


def test_a_long_line_goes_a_few_at_a_time_until_nobody_takes_what_is_offered() -> None:
    gate = WorkerGate()
    gate.shut(0.0)
    now = PROBE_SECONDS
    for _ in range(3):
        gate.nobody_waits(now)
        for _ in range(OFFERED_PLACES):
            assert gate.admits(now)
            gate.took_one(now)
        assert not gate.admits(now)
    gate.nobody_waits(now)
    gate.nobody_waits(now + PROBE_SECONDS)
    assert not gate.is_shut


def test_a_busy_takes_back_the_places_that_were_counted_before_it() -> None:
    gate = WorkerGate()
    gate.shut(0.0)
    gate.freed_one()
    gate.freed_one()
    gate.took_one(0.01)
    gate.shut(0.02)
    assert not gate.admits(0.02), "it was full when it said so"
    gate.freed_one()
    assert gate.admits(0.02)
