"""Parts of the asyncio client that differ in kind from the blocking one: channels, streams and sleeping.

sync_channels.py has the same names. Everything else of the blocking client is generated from aio.py.
"""

from asyncio import sleep as sleep
from collections.abc import AsyncGenerator, Sequence
from typing import TypeAlias, TypeVar

import grpc.aio
from blockyard.router.client.connection import Connection

Item = TypeVar("Item")
Stream: TypeAlias = AsyncGenerator[Item, None]


async def collected(stream: Stream[Item]) -> list[Item]:
    """Return every item of a stream."""
    return [item async for item in stream]


class Channels:
    """gRPC channels of one client, by address. Each is opened at first use: it belongs to the event loop that then
    runs."""

    def __init__(self, connection: Connection, addresses: Sequence[str]) -> None:
        self._connection = connection
        self._channels: dict[str, grpc.aio.Channel | None] = dict.fromkeys(addresses)

    def to(self, address: str) -> grpc.aio.Channel:
        """Return the channel to one of the client's addresses, opened if it is new."""
        channel = self._channels[address] or self._opened(address)
        self._channels[address] = channel
        return channel

    async def close(self) -> None:
        """End every connection and the calls on it."""
        for channel in self._channels.values():
            if channel is not None:
                await channel.close()

    def _opened(self, address: str) -> grpc.aio.Channel:
        credentials, options = self._connection.credentials, self._connection.options
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)
