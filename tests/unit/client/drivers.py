"""The blocking and the async client behind one interface, and a connection that breaks on demand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from blockyard.router.client import AsyncClient, Client, Delta
from blockyard.router.client.retry import AddressRotation


@asynccontextmanager
async def breakable(address: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Yield a proxy's address, and a function that cuts all its connections as the server's death would."""
    host, _, port = address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while taken := await reader.read(65536):
            writer.write(taken)

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, there_writer))
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer), return_exceptions=True)

    def break_it() -> None:
        for writer in writers:
            writer.transport.abort()

    async with await asyncio.start_server(join, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", break_it
        break_it()


class SyncDriver:
    """Drives the blocking client from a thread, so that the server may live on the test's event loop."""

    def __init__(self, addresses: str | list[str], **options: Any) -> None:
        self.client = Client(addresses, **options)
        # Which router comes first is drawn: a test that names two wants to know.
        self.client._rotation = AddressRotation(self.client._config.addresses, start=0)

    async def call(self, name: str, *positional: Any, **arguments: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, name), *positional, **arguments)

    async def collect(self, name: str, **arguments: Any) -> list[Any]:
        return await asyncio.to_thread(lambda: list(getattr(self.client, name)(**arguments)))

    async def take_one_and_close(self, **arguments: Any) -> Delta:
        def take() -> Delta:
            stream = self.client.stream(**arguments)
            first = next(stream)
            stream.close()
            return first

        return await asyncio.to_thread(take)

    async def take_one_and_go_on(self, meanwhile: Callable[[], None], **arguments: Any) -> list[Delta]:
        loop = asyncio.get_running_loop()

        def take() -> list[Delta]:
            stream = self.client.stream(**arguments)
            first = next(stream)
            loop.call_soon_threadsafe(meanwhile)
            return [first, *stream]

        return await asyncio.to_thread(take)

    async def close(self) -> None:
        self.client.close()


class AsyncDriver:
    def __init__(self, addresses: str | list[str], **options: Any) -> None:
        self.client = AsyncClient(addresses, **options)
        self.client._rotation = AddressRotation(self.client._config.addresses, start=0)

    async def call(self, name: str, *positional: Any, **arguments: Any) -> Any:
        return await getattr(self.client, name)(*positional, **arguments)

    async def collect(self, name: str, **arguments: Any) -> list[Any]:
        return [item async for item in getattr(self.client, name)(**arguments)]

    async def take_one_and_close(self, **arguments: Any) -> Delta:
        stream = self.client.stream(**arguments)
        first = await anext(stream)
        await stream.aclose()
        return first

    async def take_one_and_go_on(self, meanwhile: Callable[[], None], **arguments: Any) -> list[Delta]:
        stream = self.client.stream(**arguments)
        first = await anext(stream)
        meanwhile()
        return [first, *[delta async for delta in stream]]

    async def close(self) -> None:
        await self.client.close()


Driver = SyncDriver | AsyncDriver
Connect = Callable[..., Driver]
