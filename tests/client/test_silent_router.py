"""Two routers behind one address, of which one is frozen: it takes connections and says nothing on them."""

import asyncio
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from blockyard.router.client import AsyncClient, Client, UnavailableError

NUM_CLIENTS = 16
"""That none of them is led to the frozen router happens once in 65,536 runs."""
ANSWER_SECONDS = 90.0
GIVE_UP_SECONDS = 6.0
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
            routers[1].send_signal(signal.SIGSTOP)
            yield Shared(address=address, sound=routers[0], frozen=routers[1])
        finally:
            for router in routers:
                router.kill()
                router.wait()


def _router(address: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", ROUTER, address], stdout=subprocess.PIPE, text=True)


def _ask(address: str) -> int:
    with Client(address, timeout_seconds=ANSWER_SECONDS) as client:
        return len(client.list_models())


async def _ask_async(address: str) -> int:
    async with AsyncClient(address, timeout_seconds=ANSWER_SECONDS) as client:
        return len(await client.list_models())


async def _ask_all(address: str) -> list[int]:
    return await asyncio.gather(*(_ask_async(address) for _ in range(NUM_CLIENTS)))


def test_a_connection_that_a_frozen_router_took_is_given_up_for_another_and_nothing_is_sent_twice(
    shared: Shared,
) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        assert list(threads.map(_ask, [shared.address] * NUM_CLIENTS)) == [0] * NUM_CLIENTS
    assert asyncio.run(_ask_all(shared.address)) == [0] * NUM_CLIENTS
    shared.frozen.send_signal(signal.SIGCONT)
    time.sleep(1.0)  # It reads what came meanwhile.
    for router in (shared.sound, shared.frozen):
        router.terminate()
    calls = [router.communicate()[0].count("called") for router in (shared.sound, shared.frozen)]
    assert calls == [2 * NUM_CLIENTS, 0]


def test_where_every_router_of_an_address_is_frozen_the_client_says_so_at_its_deadline(
    shared: Shared,
) -> None:
    shared.sound.send_signal(signal.SIGSTOP)
    with (
        Client(shared.address, timeout_seconds=GIVE_UP_SECONDS) as client,
        pytest.raises(UnavailableError, match="no router answers at"),
    ):
        client.list_models()
