"""The retry policy alone, on a clock of its own."""

import grpc
import pytest
from blockyard.router.client import AsyncClient, Client
from blockyard.router.client.errors import OverloadedError, TimedOutError, UnavailableError
from blockyard.router.client.retry import AddressRotation, Attempts, ClientConfig

UNAVAILABLE = UnavailableError("gone", code=grpc.StatusCode.UNAVAILABLE)


def overloaded(retry_delay_seconds: float | None) -> OverloadedError:
    return OverloadedError(
        "full", code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_seconds=retry_delay_seconds
    )


def attempts(
    *, retries: int = 10, timeout_seconds: float = 1000.0, at: list[float] | None = None
) -> Attempts:
    """With the longest delay that jitter may draw."""
    clock = [0.0] if at is None else at
    config = ClientConfig(addresses=("a",), retries=retries, timeout_seconds=timeout_seconds)
    return Attempts(config, None, now=lambda: clock[0], jitter=lambda low, high: high)


def test_backoff_doubles_up_to_a_limit_and_jitter_never_cuts_what_the_server_says() -> None:
    trying = attempts()
    assert [trying.delay_after(UNAVAILABLE) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert attempts().delay_after(overloaded(2.0)) == pytest.approx(2.1)
    trying = Attempts(ClientConfig(addresses=("a",)), None, now=lambda: 0.0, jitter=lambda low, high: low)
    assert (trying.delay_after(UNAVAILABLE), trying.delay_after(overloaded(2.0))) == (0.0, 2.0)


def test_after_the_last_retry_the_failure_itself_is_raised_and_the_deadline_covers_all_attempts() -> None:
    trying = attempts(retries=1)
    trying.delay_after(UNAVAILABLE)
    with pytest.raises(UnavailableError):
        trying.delay_after(UNAVAILABLE)
    clock = [0.0]
    trying = attempts(timeout_seconds=10.0, at=clock)
    clock[0] = 4.0
    assert trying.remaining_seconds() == 6.0
    clock[0] = 9.95
    with pytest.raises(UnavailableError):
        trying.delay_after(UNAVAILABLE)
    clock[0] = 10.0
    with pytest.raises(TimedOutError, match="no answer within 10 s"):
        trying.remaining_seconds()


def test_calls_that_fail_together_move_on_by_one_router() -> None:
    rotation = AddressRotation(["a", "b", "c"], start=0)
    for _ in range(5):
        rotation.leave_after(UNAVAILABLE, "a")
    assert rotation.current == "b"
    rotation.leave_after(overloaded(1.0), "b")
    rotation.leave_after(UNAVAILABLE, "c")
    assert rotation.current == "a"
    rotation.leave_after(TimedOutError("late", code=grpc.StatusCode.DEADLINE_EXCEEDED), "a")
    assert rotation.current == "a"


def test_a_time_to_connect_that_makes_no_sense_is_refused() -> None:
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        for kind in (Client, AsyncClient):
            with pytest.raises(ValueError, match="connect_seconds must be positive"):
                kind("127.0.0.1:1", connect_seconds=seconds)
