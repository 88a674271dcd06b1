"""The chaos proxy does to a connection what it says, and nothing else."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.nightly.faults.chaos_proxy import ChaosProxy, ChaosProxyThread

SECONDS = 60.0
SILENCE_SECONDS = 0.15


class Echo:
    """A server that says back what it hears, and remembers it."""

    def __init__(self) -> None:
        self.address = ""
        self.heard = b""
        self.num_ended = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65_536):
                self.heard += chunk
                writer.write(chunk)
                await writer.drain()
        except ConnectionResetError:
            pass
        finally:
            self.num_ended += 1
            writer.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, text: bytes) -> bytes:
        """Send a text, and return the answer, which is the same."""
        self.writer.write(text)
        answer = await asyncio.wait_for(self.reader.readexactly(len(text)), SECONDS)
        assert answer == text
        return answer

    async def is_silent(self) -> bool:
        try:
            await asyncio.wait_for(self.reader.read(1), SILENCE_SECONDS)
        except TimeoutError:
            return True
        return False

    async def is_reset(self) -> bool:
        try:
            await asyncio.wait_for(self.reader.read(1), SECONDS)
        except ConnectionResetError:
            return True
        return False


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    echo.address = f"{host}:{port}"
    yield echo
    server.close()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[ChaosProxy]:
    async with ChaosProxy(echo.address) as proxy:
        yield proxy


async def connect(proxy: ChaosProxy) -> Client:
    host, _, port = proxy.address.rpartition(":")
    return Client(*await asyncio.open_connection(host, int(port)))


async def seconds_of(work: Awaitable[object]) -> float:
    """Return the seconds that this takes. Fails where it takes minutes."""
    began = time.monotonic()
    async with asyncio.timeout(SECONDS):
        await work
    return time.monotonic() - began


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_without_a_fault_bytes_and_ends_pass(echo: Echo, proxy: ChaosProxy) -> None:
    client = await connect(proxy)
    sent = bytes(range(256)) * 4096
    assert await client.ask(sent) == sent
    client.writer.write_eof()
    assert await client.reader.read() == b""
    await until(lambda: proxy.num_open == 0)
    assert (echo.num_ended, proxy.num_accepted) == (1, 1)


async def test_latency_is_added_to_a_round_trip_and_not_to_each_byte(proxy: ChaosProxy) -> None:
    client = await connect(proxy)
    await proxy.latency(0.2, jitter=0.05)
    assert await seconds_of(client.ask(bytes(1_000_000))) >= 0.2
    await proxy.latency(10 * SECONDS)
    await proxy.heal()
    await seconds_of(client.ask(b"again"))
    assert proxy.num_accepted == 1, "the connection lost nothing, so it stands"


async def test_jitter_does_not_reorder(proxy: ChaosProxy) -> None:
    client = await connect(proxy)
    await proxy.latency(0.0, jitter=0.05)
    texts = [f"{number:03}".encode() for number in range(30)]
    for text in texts:
        client.writer.write(text)
        await asyncio.sleep(0.001)
    assert await asyncio.wait_for(client.reader.readexactly(90), SECONDS) == b"".join(texts)


async def test_bandwidth_is_shared_by_all_connections(proxy: ChaosProxy) -> None:
    clients = [await connect(proxy) for _ in range(2)]
    await proxy.bandwidth(200_000)
    asked = asyncio.gather(*(client.ask(bytes(20_000)) for client in clients))
    assert await seconds_of(asked) >= 0.2


async def test_reset_ends_every_connection_at_both_ends_once(echo: Echo, proxy: ChaosProxy) -> None:
    clients = [await connect(proxy) for _ in range(2)]
    for client in clients:
        await client.ask(b"hello")
    await proxy.reset()
    assert [await client.is_reset() for client in clients] == [True, True]
    await until(lambda: echo.num_ended == 2)
    assert await (await connect(proxy)).ask(b"again") == b"again"


async def test_in_a_black_hole_connections_stay_and_new_ones_are_silent(
    echo: Echo, proxy: ChaosProxy
) -> None:
    client = await connect(proxy)
    await client.ask(b"before")
    await proxy.black_hole()
    client.writer.write(b"lost")
    late = await connect(proxy)
    late.writer.write(b"lost too")
    assert await client.is_silent()
    assert await late.is_silent()
    assert echo.heard == b"before"
    await proxy.heal()
    assert await client.is_reset()
    assert await late.is_reset()
    assert await (await connect(proxy)).ask(b"after") == b"after"
    assert echo.heard == b"beforeafter"


async def test_who_said_nothing_in_a_black_hole_lives_on(proxy: ChaosProxy) -> None:
    client = await connect(proxy)
    await client.ask(b"before")
    await proxy.black_hole()
    assert await client.is_silent()
    await proxy.heal()
    assert await client.ask(b"after") == b"after"


async def test_a_black_hole_may_have_one_direction(echo: Echo, proxy: ChaosProxy) -> None:
    client = await connect(proxy)
    await proxy.black_hole(upstream=False)
    client.writer.write(b"heard")
    await until(lambda: echo.heard == b"heard")
    assert await client.is_silent()
    await proxy.heal()
    assert await client.is_reset()
    client = await connect(proxy)
    await client.ask(b".")
    await proxy.black_hole(downstream=False)
    client.writer.write(b"unheard")
    assert await client.is_silent()
    assert echo.heard == b"heard."


@pytest.mark.parametrize("leave", [asyncio.StreamWriter.close, lambda writer: writer.transport.abort()])
async def test_a_black_hole_swallows_the_end_of_a_connection(
    leave: Callable[[asyncio.StreamWriter], None], echo: Echo, proxy: ChaosProxy
) -> None:
    client = await connect(proxy)
    await client.ask(b"hello")
    await proxy.black_hole()
    leave(client.writer)
    await asyncio.sleep(SILENCE_SECONDS)
    assert (echo.num_ended, proxy.num_open) == (0, 1)
    await proxy.heal()
    await until(lambda: echo.num_ended == 1)
    assert proxy.num_open == 0


async def test_a_reset_ends_a_black_hole_s_connections_too(echo: Echo, proxy: ChaosProxy) -> None:
    client = await connect(proxy)
    await client.ask(b"hello")
    await proxy.black_hole()
    client.writer.write(b"lost")
    late = await connect(proxy)
    assert await client.is_silent()
    await proxy.reset()
    assert await client.is_reset()
    assert await late.is_reset()
    await until(lambda: echo.num_ended == 1)
    assert proxy.num_open == 0


async def test_refused_are_old_connections_and_new_ones_until_it_heals(
    proxy: ChaosProxy, caplog: pytest.LogCaptureFixture
) -> None:
    client = await connect(proxy)
    await client.ask(b"hello")
    await proxy.refuse()
    assert await client.is_reset()
    for _ in range(2):
        assert await _is_refused(proxy)
    await proxy.heal()
    assert await (await connect(proxy)).ask(b"again") == b"again"
    assert caplog.records == [], "the event loop complains of nothing"


async def _is_refused(proxy: ChaosProxy) -> bool:
    """Return whether the connection is reset. On loopback the reset may arrive before the client sees the connection as
    open."""
    try:
        return await (await connect(proxy)).is_reset()
    except ConnectionResetError:
        return True


async def test_a_target_that_is_away_is_a_reset(proxy: ChaosProxy) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        await proxy.point_at(f"127.0.0.1:{nobody.getsockname()[1]}")
        assert await _is_refused(proxy)


async def test_new_connections_follow_to_another_target(echo: Echo, proxy: ChaosProxy) -> None:
    other = Echo()
    server = await asyncio.start_server(other.serve, "127.0.0.1", 0)
    client = await connect(proxy)
    await client.ask(b"1")
    host, port = server.sockets[0].getsockname()
    await proxy.point_at(f"{host}:{port}")
    await client.ask(b"2")
    await (await connect(proxy)).ask(b"3")
    assert (echo.heard, other.heard) == (b"12", b"3")
    server.close()


async def test_the_link_may_flap(proxy: ChaosProxy) -> None:
    faults: list[Callable[[], Awaitable[None]]] = [proxy.black_hole, proxy.refuse]
    for fault in faults * 3:
        await fault()
        await asyncio.sleep(0.01)
        await proxy.heal()
        assert await (await connect(proxy)).ask(b"up") == b"up"


def test_a_synchronous_test_has_the_same_proxy_in_a_thread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with ChaosProxyThread(f"{host}:{port}") as proxy:
            address = ("127.0.0.1", int(proxy.address.rpartition(":")[2]))
            with socket.create_connection(address, SECONDS) as client:
                served, _ = server.accept()
                client.sendall(b"hello")
                assert served.recv(5) == b"hello"
                assert (proxy.num_accepted, proxy.num_open) == (1, 1)
                proxy.black_hole()
                served.sendall(b"lost")
                client.settimeout(SILENCE_SECONDS)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                proxy.heal()
                client.settimeout(SECONDS)
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
                served.close()
