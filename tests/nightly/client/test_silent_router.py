"""Two routers behind one address, of which one is frozen: it accepts connections and sends nothing on them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Thread

import pytest
from blockyard.router.client import AsyncClient, Client, UnavailableError

NUM_CLIENTS = 16
"""Enough clients: all of them avoid the frozen router by chance in one of 65,536 runs."""
ANSWER_SECONDS = 90.0
GIVE_UP_SECONDS = 6.0
GREETING_SECONDS = 3.0
"""More than clients wait for unless they are told to."""
ROUTER = textwrap.dedent("""
    import sys
    from concurrent.futures import ThreadPoolExecutor
    import grpc
    from blockyard.proto.v1 import inference_pb2, inference_pb2_grpc

    class Router(inference_pb2_grpc.InferenceServiceServicer):
        def ListModels(self, request, context):
            print("called", flush=True)
            return inference_pb2.ListModelsResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Router(), server)
    server.add_insecure_port(sys.argv[1])
    server.start()
    print("serves", flush=True)
    server.wait_for_termination()
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One address with two processes behind it."""

    address: str
    sound: "subprocess.Popen[str]"
    frozen: "subprocess.Popen[str]"


@pytest.fixture
def shared() -> Iterator[Shared]:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        routers = [_router(address) for _ in range(2)]
        try:
            for router in routers:
                assert router.stdout is not None
                assert router.stdout.readline() == "serves\n"
            _freeze(routers[1])
            yield Shared(address=address, sound=routers[0], frozen=routers[1])
        finally:
            for router in routers:
                router.kill()
                router.wait()


def _router(address: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", ROUTER, address], stdout=subprocess.PIPE, text=True)


def _freeze(router: "subprocess.Popen[str]") -> None:
    """Stop a router, and wait until it has stopped. On a busy machine its threads may greet clients until then."""
    router.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, router.pid, os.WSTOPPED)


@contextmanager
def slow_to_greet(router: str) -> Iterator[str]:
    """An address whose connections reach the router GREETING_SECONDS late."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(65_536):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(GREETING_SECONDS)
        host, _, port = router.rpartition(":")
        onward, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, back), pump(onward, writer))

    async def main(found: "Future[str]", is_over: asyncio.Event) -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            found.set_result(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await is_over.wait()

    found: Future[str] = Future()
    is_over, loop = asyncio.Event(), asyncio.new_event_loop()
    thread = Thread(target=lambda: loop.run_until_complete(main(found, is_over)))
    thread.start()
    try:
        yield found.result(ANSWER_SECONDS)
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()


def _ask(address: str) -> int:
    with Client(address, timeout_seconds=ANSWER_SECONDS) as client:
        return len(client.list_models())


async def _ask_async(address: str) -> int:
    async with AsyncClient(address, timeout_seconds=ANSWER_SECONDS) as client:
        return len(await client.list_models())


async def _ask_all(address: str) -> list[int]:
    return await asyncio.gather(*(_ask_async(address) for _ in range(NUM_CLIENTS)))


def test_a_connection_that_a_frozen_router_took_is_given_up_for_another_and_nothing_is_sent_twice(shared):
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        assert list(threads.map(_ask, [shared.address] * NUM_CLIENTS)) == [0] * NUM_CLIENTS
    assert asyncio.run(_ask_all(shared.address)) == [0] * NUM_CLIENTS
    shared.frozen.send_signal(signal.SIGCONT)
    time.sleep(1.0)  # It reads what came meanwhile.
    for router in (shared.sound, shared.frozen):
        router.terminate()
    calls = [router.communicate()[0].count("called") for router in (shared.sound, shared.frozen)]
    assert calls == [2 * NUM_CLIENTS, 0]


def test_where_every_router_of_an_address_is_frozen_the_client_says_so_at_its_deadline(shared: Shared):
    _freeze(shared.sound)
    with (
        Client(shared.address, timeout_seconds=GIVE_UP_SECONDS) as client,
        pytest.raises(UnavailableError, match="no router answers at"),
    ):
        client.list_models()


def test_a_router_that_is_slow_to_greet_is_reached_by_a_client_with_more_time_to_connect(shared: Shared):
    shared.frozen.send_signal(signal.SIGCONT)
    with slow_to_greet(shared.address) as address:
        with (
            Client(address, timeout_seconds=GIVE_UP_SECONDS) as hasty,
            pytest.raises(UnavailableError, match="no router answers at"),
        ):
            hasty.list_models()
        with Client(address, timeout_seconds=ANSWER_SECONDS, connect_seconds=ANSWER_SECONDS) as client:
            assert client.list_models() == []

        async def ask() -> int:
            async with AsyncClient(address, connect_seconds=ANSWER_SECONDS) as patient:
                return len(await patient.list_models())

        assert asyncio.run(ask()) == 0
