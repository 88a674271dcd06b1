"""Incomplete requests: how much memory they may hold, alone and together, and for how long."""

import asyncio
from contextlib import ExitStack, nullcontext

import pytest
from blockyard.router.admission.auth import PRINCIPAL, Principal, Role
from blockyard.router.calls import intake as bounds
from blockyard.router.calls.intake import Intake
from blockyard.router.errors import DeadlinePassed, Overloaded

BUDGET = 1000


A, B, C = (f"ipv4:10.0.0.{host}:50000" for host in (1, 2, 3))
"""Addresses of clients."""


def peer() -> str:
    return A


async def never() -> bytes:
    await asyncio.Event().wait()
    return b""


def test_one_client_has_half_of_the_budget_at_most_all_together_have_one_and_bytes_are_given_back() -> None:
    intake = Intake(budget_bytes=BUDGET)
    for _ in range(2):
        with ExitStack() as stack:
            first, second, third = (stack.enter_context(intake.charge(name)) for name in (A, B, C))
            first.grow(300)
            first.grow(200)
            with pytest.raises(Overloaded, match="of this client") as refused:
                first.grow(1)
            assert refused.value.retry_after_seconds == bounds.RETRY_SECONDS
            assert intake.held_bytes == 500
            second.grow(450)
            third.grow(50)
            with pytest.raises(Overloaded, match="too many large requests are"):
                third.grow(1)
        assert intake.held_bytes == 0


@pytest.mark.parametrize(
    ("first", "second", "tenant", "is_one"),
    [
        ("ipv4:10.0.0.1:50000", "ipv4:10.0.0.1:50001", "", True),
        ("ipv4:10.0.0.1:50000", "ipv4:10.0.0.2:50000", "", False),
        ("ipv6:[2001:db8:0:1::1]:50000", "ipv6:%5B2001:db8:0:1:ffff::2%5D:50000", "", True),
        ("ipv6:[2001:db8:0:1::1]:50000", "ipv6:[2001:db8:0:2::1]:50000", "", False),
        ("ipv6:[::ffff:10.0.0.1]:50000", "ipv4:10.0.0.1:50000", "", True),
        (A, B, "acme", True),
    ],
)
def test_an_address_a_network_of_ipv6_or_a_tenant_is_one_client(first, second, tenant, is_one):
    intake = Intake(budget_bytes=BUDGET)
    token = PRINCIPAL.set(Principal(name="ann", role=Role.USER, tenant=tenant) if tenant else PRINCIPAL.get())
    try:
        with intake.charge(first) as one, intake.charge(second) as other:
            one.grow(500)
            with pytest.raises(Overloaded, match="of this client") if is_one else nullcontext():
                other.grow(500)
    finally:
        PRINCIPAL.reset(token)


async def test_a_message_that_is_there_is_never_charged_even_when_all_is_taken() -> None:
    async def there() -> bytes:
        return b"whole"

    intake = Intake(budget_bytes=BUDGET)
    with intake.charge(A) as charge, intake.charge(B) as other:
        charge.grow(500)
        other.grow(500)
        assert await intake.message(there, most_bytes=10**9, peer=peer) == b"whole"


async def test_a_slow_message_is_charged_as_the_largest_and_refused_where_there_is_no_room(monkeypatch):
    monkeypatch.setattr(bounds, "PROMPT_SECONDS", 0.01)
    intake = Intake(budget_bytes=BUDGET)
    with pytest.raises(Overloaded):
        await intake.message(never, most_bytes=501, peer=peer)
    waiting = asyncio.ensure_future(intake.message(never, most_bytes=500, peer=peer))
    async with asyncio.timeout(20):
        while not intake.held_bytes:  # noqa: ASYNC110 - a timer changes it
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await intake.message(never, most_bytes=1, peer=peer)
    assert (intake.held_bytes, intake.num_incomplete) == (500, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (intake.held_bytes, intake.num_incomplete) == (0, 0)


async def test_a_message_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "PROMPT_SECONDS", 0.01)
    monkeypatch.setattr(bounds, "MESSAGE_SECONDS", 0.05)
    intake = Intake(budget_bytes=BUDGET)
    with pytest.raises(DeadlinePassed, match="not complete"):
        await intake.message(never, most_bytes=1, peer=peer)
    assert (intake.held_bytes, intake.num_incomplete) == (0, 0)


async def test_messages_beyond_their_number_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounds, "MAX_INCOMPLETE", 1)
    intake = Intake(budget_bytes=BUDGET)
    waiting = asyncio.ensure_future(intake.message(never, most_bytes=1, peer=peer))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await intake.message(never, most_bytes=1, peer=peer)
    waiting.cancel()
