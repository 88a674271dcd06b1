"""Messages that never end, or never begin: a router bounds their size, number and time."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.calls.intake import BUDGET_BYTES, MESSAGE_SECONDS
from blockyard.router.services.interceptor import MAX_LASTING, MAX_LASTING_A_CLIENT
from blockyard.router.services.options import MAX_CONNECTIONS, MIN_MESSAGE_BYTES
from grpc_health.v1 import health_pb2

from .frames import FIRST_WINDOW_BYTES, PREFACE, Connection
from .rig import CANARY, House, outcome_of, until

GENERATE = "/blockyard.v1.InferenceService/Generate"
HEALTH = "/grpc.health.v1.Health"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MAX_GROWTH_BYTES = BUDGET_BYTES + 128 * 2**20
"""The budget, and the bytes that arrive within PROMPT_SECONDS."""
PATIENCE_SECONDS = 60.0


def serve_until(connection: Connection, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it does not come true"
        assert not connection.is_closed
        connection.serve(0.2)


def test_messages_that_never_end_hold_no_more_than_the_budget_and_keep_nobody_out(house: House) -> None:
    """Send all but the last bytes of 400 messages of 4 MiB. Without a bound 1.6 GB are held until the client goes."""
    before = house.router.resident_bytes
    with Connection(house.router.address) as connection:
        for _ in range(400):
            connection.call(GENERATE, MIN_MESSAGE_BYTES, MIN_MESSAGE_BYTES - 100)
        connection.serve(2 * MESSAGE_SECONDS / 10)
        assert len(house.tokens()) == 8
        assert house.router.resident_bytes - before < MAX_GROWTH_BYTES
        serve_until(connection, lambda: len(connection.ended) == 400)
        assert house.router.resident_bytes - before < MAX_GROWTH_BYTES
    house.check()


def test_calls_that_do_not_send_their_message_are_ended(house: House) -> None:
    """Send a byte at intervals, which does not keep the messages alive."""
    with Connection(house.router.address) as connection:
        silent, *dripping = (connection.call(GENERATE, MIN_MESSAGE_BYTES, sent) for sent in (0, 1, 60_000))

        def are_ended() -> bool:
            for stream in dripping:
                if stream not in connection.ended:
                    connection.drip(stream)
            return {silent, *dripping} <= set(connection.ended)

        serve_until(connection, are_ended)
    house.check()


def test_what_a_client_sends_before_its_message_is_read_is_bounded_however_fast_it_is(house: House) -> None:
    """gRPC's probe of the bandwidth would open 16 MiB for each call."""
    with Connection(house.router.address) as connection:
        for _ in range(40):
            connection.call(GENERATE, MIN_MESSAGE_BYTES, MIN_MESSAGE_BYTES - 100)
        serve_until(connection, lambda: connection.unsent_bytes == 0)
        assert connection.first_window_bytes <= FIRST_WINDOW_BYTES


def test_calls_that_break_off_in_the_middle_leave_nothing(house: House) -> None:
    """The package checks the logs afterwards."""
    for sent_bytes in (0, 1, 60_000):
        with Connection(house.router.address) as connection:
            for _ in range(50):
                connection.break_off(connection.call(GENERATE, MIN_MESSAGE_BYTES, sent_bytes))
            connection.serve(0.2)
    house.check()


def test_a_call_without_a_message_is_invalid_and_one_with_two_is_answered_by_its_first(house: House) -> None:
    call = house.channel.stream_unary(GENERATE)
    with pytest.raises(grpc.RpcError) as caught:
        call(iter(()), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert outcome_of(caught.value).reason == "MALFORMED_MESSAGE"
    good = inference_pb2.GenerateRequest(prompt="def f(x):", sampling={"max_tokens": 8, "temperature": 0.0})
    raw = call(iter((good.SerializeToString(), b"\xff\xff" + CANARY.encode())), timeout=30)
    assert len(inference_pb2.GenerateResponse.FromString(raw).token_ids) == 8
    house.check()


def test_calls_that_last_are_counted_by_client_and_in_all(house: House) -> None:
    """A Watch needs no token and has no deadline."""
    raw = health_pb2.HealthCheckRequest().SerializeToString()
    watch = house.channel.unary_stream(f"{HEALTH}/Watch")
    taken = [watch(raw, timeout=120) for _ in range(MAX_LASTING_A_CLIENT)]
    assert all(next(call) for call in taken)
    with pytest.raises(grpc.RpcError) as caught:
        next(watch(raw, timeout=30))
    assert outcome_of(caught.value).reason == "OVERLOADED"
    assert house.channel.unary_unary(f"{HEALTH}/Check")(raw, timeout=30)
    with ExitStack() as stack:
        for number in range(2, MAX_LASTING // MAX_LASTING_A_CLIENT + 1):
            others = stack.enter_context(Connection(house.router.address, source=f"127.0.0.{number}"))
            assert num_refused(others, MAX_LASTING_A_CLIENT + 1) == 1
        newcomer = stack.enter_context(Connection(house.router.address, source="127.0.0.100"))
        assert num_refused(newcomer, 1) == 1
    for call in taken:
        call.cancel()

    def is_free() -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(next(watch(raw, timeout=10)))
        return False

    until(is_free)


def num_refused(connection: Connection, num_watches: int) -> int:
    """Return how many of these Watches the server ends at once. At least one must end."""
    for _ in range(num_watches):
        # That many bytes are one field that no request has.
        connection.call(f"{HEALTH}/Watch", 20, 20)
    serve_until(connection, lambda: bool(connection.ended) and not connection.unsent_bytes)
    connection.serve(0.5)
    return len(connection.ended)


def test_reflections_that_ask_nothing_more_end_well_and_hold_nothing_of_the_budget(house: House) -> None:
    """Send more than a client may have messages in flight, of the largest size."""
    is_over = threading.Event()

    def questions() -> Iterator[bytes]:
        yield b"\x3a\x00"  # list_services
        is_over.wait(PATIENCE_SECONDS)

    reflect = house.channel.stream_stream(REFLECT)
    calls: list[Any] = [
        reflect(questions(), timeout=PATIENCE_SECONDS)
        for _ in range(BUDGET_BYTES // MIN_MESSAGE_BYTES // 2 + 4)
    ]
    assert all(b"blockyard.v1.InferenceService" in next(call) for call in calls)
    assert [list(call) for call in calls] == len(calls) * [[]]
    assert {call.code() for call in calls} == {grpc.StatusCode.OK}
    is_over.set()


def test_connections_beyond_their_number_are_closed_and_others_go_on(house: House) -> None:
    host, _, port = house.router.address.rpartition(":")
    with ExitStack() as stack:
        sockets = []
        for _ in range(MAX_CONNECTIONS + 50):
            sockets.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=10)))
            with contextlib.suppress(OSError):
                sockets[-1].sendall(PREFACE[:10])
        assert sum(map(is_closed, sockets[-40:])) == 40
        assert len(house.tokens()) == 8
    house.check()


def is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(65_536)
    except TimeoutError:
        return False
    except OSError:
        return True
