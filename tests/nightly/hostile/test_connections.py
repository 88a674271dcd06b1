"""Connections that are wrong before any message: bytes of other protocols, silence, floods, bombs, metadata. Real
sockets.

Scaled down for two cores: 300 connections and 2,000 streams stand for ten thousand of each.
"""

import socket
import threading
import time
from contextlib import ExitStack
from itertools import islice

import grpc
import pytest
from blockyard.proto.naming.headers import TENANT
from blockyard.proto.v1 import cluster_pb2, inference_pb2
from blockyard.router.services.cluster import MAX_WATCHES_OF_A_CLIENT
from blockyard.router.services.options import HANDSHAKE_SECONDS

from .rig import CANARY, CHANNEL_OPTIONS, GREEDY, House, assert_discreet, outcome_of, until

DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
MAX_GROWTH_BYTES = 128 * 2**20


def connect(house: House, first: bytes = b"") -> socket.socket:
    host, _, port = house.router.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.sendall(first)
    connection.settimeout(0.5)
    return connection


def is_closed_within(connection: socket.socket, seconds: float, drip: bytes = b"") -> bool:
    """Read what comes, and send a byte of `drip` at intervals."""
    deadline = time.monotonic() + seconds
    bytes_left = iter(drip)
    while time.monotonic() < deadline:
        try:
            connection.sendall(bytes(islice(bytes_left, 1)))
            if not connection.recv(65_536):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /blockyard.v1.InferenceService/Generate HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 500,
        b"\0" * 10_000,
        PREFACE + b"\xff" * 10_000,
        PREFACE + SETTINGS + b"\xff\xff\xff\x01\x25\x00\x00\x00\x01" + b"a" * 10_000,
    ],
    ids=["http/1.1 get", "http/1.1 post", "tls", "zeros", "frames of 0xff", "headers of 16 MB"],
)
def test_another_protocol_is_closed_on(house: House, first: bytes) -> None:
    with connect(house, first) as connection:
        assert is_closed_within(connection, 10)
    house.check()


def test_silence_and_a_byte_now_and_then_end_with_the_handshake_and_leave_no_file(house: House) -> None:
    house.check()
    files = house.router.num_files
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(house)) for _ in range(300)]
        half = stack.enter_context(connect(house, PREFACE[:10]))
        slow = stack.enter_context(connect(house))
        # Checked first: on a slow machine the earliest handshakes would be over after the check.
        until(lambda: house.router.num_files > files + 250)
        house.check()
        assert is_closed_within(slow, 3 * HANDSHAKE_SECONDS, PREFACE[:-1] + SETTINGS * 100)
        assert is_closed_within(half, 3 * HANDSHAKE_SECONDS)
        assert all(is_closed_within(connection, HANDSHAKE_SECONDS) for connection in silent)
    until(lambda: house.router.num_files <= files + 10)
    house.check()


def test_a_flood_of_pings_is_told_to_calm_down(house: House) -> None:
    with connect(house, PREFACE + SETTINGS) as connection:
        connection.settimeout(20.0)
        answers = b""
        try:
            for _ in range(2_000):
                connection.sendall(PING)
            while piece := connection.recv(65_536):
                answers += piece
        except TimeoutError:
            pytest.fail("the flood goes on")
        except OSError:
            pass  # closed on while we went on
    house.check()


def test_a_bomb_of_gzip_is_exhausted_before_it_is_unpacked(house: House) -> None:
    peak, is_over = house.router.resident_bytes, threading.Event()
    before = peak

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.005):
            peak = max(peak, house.router.resident_bytes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        outcome = house.call(
            "InferenceService/Generate",
            b"\x12" + b"\0" * (256 * 2**20),
            compression=grpc.Compression.Gzip,
            timeout=60,
        )
    finally:
        is_over.set()
        watcher.join()
    assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak - before < MAX_GROWTH_BYTES
    house.check()


def test_a_message_beyond_16_mib_is_exhausted(house: House) -> None:
    outcome = house.call("InferenceService/Generate", b"\x12" + b"\0" * (17 * 2**20), timeout=60)
    assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    house.check()


@pytest.mark.parametrize("kibibytes", [17, 64, 1024])
def test_metadata_beyond_the_limit_is_exhausted(house: House, kibibytes: int) -> None:
    request = inference_pb2.GenerateRequest(prompt="x", sampling={"max_tokens": 1})
    metadata = (("x-much", CANARY * (kibibytes * 1024 // len(CANARY))),)
    outcome = house.call("InferenceService/Generate", request, metadata=metadata)
    assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_discreet(outcome)
    house.check()


@pytest.mark.parametrize("value", ["", "a" * 129, "a b", "../..", "*"])
def test_a_tenant_that_is_no_name_is_refused(house: House, value: str) -> None:
    request = inference_pb2.GenerateRequest(prompt="x", sampling={"max_tokens": 1})
    outcome = house.call("InferenceService/Generate", request, metadata=(("blockyard-tenant", value),))
    assert (outcome.code, outcome.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("blockyard-tenant",))
    house.check()


@pytest.mark.parametrize("method", ["InferenceService/Nothing", "NoService/Generate", "../../etc/passwd", ""])
def test_a_method_that_is_none_is_unimplemented(house: House, method: str) -> None:
    outcome = house.call(method, b"")
    assert outcome.code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
    assert_discreet(outcome)


def test_thousands_of_calls_are_refused_or_served_and_a_running_stream_goes_on(house: House) -> None:
    victim = inference_pb2.GenerateRequest(
        prompt="def f(x):", sampling=GREEDY | {"max_tokens": 300, "ignore_eos": True}
    )
    reference = house.inference.Generate(victim, timeout=60).token_ids
    raw = inference_pb2.GenerateRequest(prompt=CANARY, sampling={"max_tokens": 2}).SerializeToString()
    stream = house.inference.GenerateStream(victim, timeout=120)
    next(stream)
    with grpc.insecure_channel(house.router.address, options=CHANNEL_OPTIONS) as channel:
        generate = channel.unary_unary("/blockyard.v1.InferenceService/Generate")
        calls = [generate.future(raw, timeout=120) for _ in range(2_000)]
        assert [token for message in stream for token in message.delta.token_ids][-200:] == reference[-200:]
        codes = {call.code() for call in calls}
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
    house.check()


def test_watches_beyond_the_limit_are_refused_and_the_others_go_on(house: House) -> None:
    raw = cluster_pb2.WatchWorkersRequest().SerializeToString()
    with grpc.insecure_channel(house.router.address, options=CHANNEL_OPTIONS) as channel:
        watch = channel.unary_stream("/blockyard.v1.ClusterService/WatchWorkers")
        taken = []
        for name in ("one", "other", "third"):
            named = ((TENANT, name),)
            if name != "third":
                taken += [watch(raw, timeout=120, metadata=named) for _ in range(MAX_WATCHES_OF_A_CLIENT)]
                assert all(next(call) for call in taken[-MAX_WATCHES_OF_A_CLIENT:]), "whatever others hold"
            with pytest.raises(grpc.RpcError) as caught:
                next(watch(raw, timeout=120, metadata=named))
            assert outcome_of(caught.value).reason == "OVERLOADED"
        assert all(call.is_active() for call in taken)
        for call in taken:
            call.cancel()
        until(
            lambda: house.call("ClusterService/WatchWorkers", raw, streams=True, timeout=0.5).code is DEADLINE
        )
    house.check()


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"])
def test_malformed_bytes_to_health_and_reflection_are_never_unknown(house: House, raw: bytes) -> None:
    checked = house.channel.unary_unary("/grpc.health.v1.Health/Check")
    with pytest.raises(grpc.RpcError) as caught:
        checked(raw, timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    reflect = house.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with pytest.raises(grpc.RpcError) as caught:
        list(reflect(iter([raw]), timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    house.check()
