"""What is charged is given back exactly; a busy worker is asked no more often than it has places; lines keep order."""

import asyncio

import pytest
from blockyard.router.admission import (
    PROBE_SECONDS,
    AdmissionLedger,
    WaitingLine,
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


async def test_the_line_keeps_the_order_of_arrival() -> None:
    line = WaitingLine()
    served: list[int] = []
    is_open = False

    async def request(number: int) -> None:
        async with line.turn():
            while not is_open:
                await line.change()
            served.append(number)

    async with asyncio.TaskGroup() as tasks:
        waiting = []
        for number in range(10):
            waiting.append(tasks.create_task(request(number)))
            await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[4].cancel()
        await asyncio.sleep(0.01)
        is_open = True
        line.notify()
    assert served == [1, 2, 3, 5, 6, 7, 8, 9]
