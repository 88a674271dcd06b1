"""Parts of the blocking client that differ in kind from the asyncio one: channels, streams and sleeping.

aio_channels.py has the same names. sync.py is generated from aio.py and uses these.
"""

from collections.abc import Generator, Sequence
from time import sleep as sleep
from typing import TypeAlias, TypeVar

import grpc
from blockyard.router.client.connection import Connection

Item = TypeVar("Item")
Stream: TypeAlias = Generator[Item, None, None]


def collected(stream: Stream[Item]) -> list[Item]:
    """Return every item of a stream."""
    return list(stream)


class Channels:
    """gRPC channels of one client, by address. All are opened at once, so that threads can share them."""

    def __init__(self, connection: Connection, addresses: Sequence[str]) -> None:
        self._channels = {address: _opened(connection, address) for address in addresses}

    def to(self, address: str) -> grpc.Channel:
        """Return the channel to one of the client's addresses."""
        return self._channels[address]

    def close(self) -> None:
        """End every connection and the calls on it."""
        for channel in self._channels.values():
            channel.close()


def _opened(connection: Connection, address: str) -> grpc.Channel:
    if connection.credentials is None:
        return grpc.insecure_channel(address, options=connection.options)
    return grpc.secure_channel(address, connection.credentials, options=connection.options)
