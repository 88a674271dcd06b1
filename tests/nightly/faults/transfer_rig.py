"""Parts of the rows of transfers: blocks of megabytes, and a proxy that does harm at a byte of a pull.

A prefix is larger than the buffers of a connection, so its source is still sending when the harm comes.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.unit.worker.test_transfer import BLOCKS

KV_SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 6}
"""Changes of the tiny checkpoint: much KV and little to compute."""
BLOCK_BYTES = 2 * 6 * 8 * 16 * 128 * 4
PREFIX_BYTES = BLOCKS * BLOCK_BYTES
"""9 MiB."""
RECEIVE_BUFFER_BYTES = 65_536
CHUNK_BYTES = 16_384


class Tap:
    """A proxy before a transfer port. It does `harm` once it has passed on so many bytes of the port's worker."""

    def __init__(self, port: int, position: int, harm: Callable[[], Awaitable[object]]) -> None:
        self._port, self._position, self._harm = port, position, harm
        self.passed = 0
        self.address = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = socket.socket()
        upstream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        upstream.setblocking(False)
        await asyncio.get_running_loop().sock_connect(upstream, ("127.0.0.1", self._port))
        up_reader, up_writer = await asyncio.open_connection(sock=upstream, limit=RECEIVE_BUFFER_BYTES)
        self._tasks.add(forth := asyncio.create_task(self._copy(reader, up_writer)))
        try:
            while data := await up_reader.read(self._next_bytes()):
                writer.write(data)
                await writer.drain()
                self.passed += len(data)
                if self.passed == self._position:
                    await self._harm()
        except OSError:
            pass  # one of the two was killed
        finally:
            forth.cancel()
            writer.close()
            up_writer.close()

    def _next_bytes(self) -> int:
        left = self._position - self.passed
        return min(CHUNK_BYTES, left) if left > 0 else CHUNK_BYTES

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)


@asynccontextmanager
async def tapped(port: int, position: int, harm: Callable[[], Awaitable[object]]) -> AsyncIterator[Tap]:
    tap = Tap(port, position, harm)
    async with await asyncio.start_server(tap.serve, "127.0.0.1", 0) as server:
        tap.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield tap
