"""A TCP proxy that harms what passes through it: latency, a narrow link, resets, refusals, black holes.

Owns one listening port and its connections to one target. Does not own when a fault comes nor what it should
cost: tests say both. Nothing in here knows a protocol; a fault begins and ends between two chunks of bytes.

    client ──▶ proxy.address ──up──▶ target
           ◀────────────────down───

`ChaosProxy` lives in the test's own event loop, `ChaosProxyThread` in a thread, for synchronous tests: the same names
without `await`. Flapping is a loop of `black_hole`, sleep, `heal`, sleep.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from math import inf
from typing import Any, Self

CHUNK_BYTES = 16_384
IN_FLIGHT_CHUNKS = 64
"""Maximum chunks in flight per connection and direction. At the bound the proxy stops reading, so the sender has to
wait."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(slots=True, kw_only=True)
class _Way:
    """One direction of the link, shared by all connections."""

    is_black_hole: bool = False
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    bytes_per_second: float = inf
    free_at: float = 0.0
    """Time at which the link has sent everything that was queued on it."""

    def arrival(self, num_bytes: int, now: float) -> float:
        self.free_at = max(now, self.free_at) + num_bytes / self.bytes_per_second
        return self.free_at + self.delay_seconds + random.uniform(0, self.jitter_seconds)

    def heal(self) -> None:
        self.is_black_hole = False
        self.delay_seconds = self.jitter_seconds = self.free_at = 0.0
        self.bytes_per_second = inf


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection:
    task: asyncio.Task[Any]
    writers: list[asyncio.StreamWriter]
    has_lost: bool = False
    """True once a black hole swallowed bytes or an end: the connection can never be whole again."""
    is_reset: bool = False

    def reset(self) -> None:
        """Both ends see ECONNRESET, not an orderly end."""
        self.is_reset = True
        for writer in self.writers:
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
                )
            writer.transport.abort()
        if self.task is not asyncio.current_task():
            self.task.cancel()


class ChaosProxy:
    """`async with ChaosProxy("host:port") as proxy`: clients connect to `proxy.address`. Faults add up until `heal`."""

    def __init__(self, target: str, *, listen: str = "127.0.0.1:0") -> None:
        self.address = ""
        self.num_accepted = 0
        """Connections that clients ever opened, refused ones too."""
        self._target, self._listen = target, listen
        self._up, self._down = _Way(), _Way()
        self._refuses = False
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        at, _, wanted = self._listen.rpartition(":")
        self._server = await asyncio.start_server(self._accept, at, int(wanted))
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.reset()

    @property
    def num_open(self) -> int:
        return len(self._connections)

    async def latency(self, seconds: float, jitter: float = 0.0) -> None:
        """Each round trip takes so much longer, and up to `jitter` more: half of it each way. Bytes stay in order."""
        for way in (self._up, self._down):
            way.delay_seconds, way.jitter_seconds = seconds / 2, jitter / 2

    async def bandwidth(self, bytes_per_second: float) -> None:
        """Limit the rate of all connections together, in each direction."""
        for way in (self._up, self._down):
            way.bytes_per_second = bytes_per_second

    async def black_hole(self, upstream: bool = True, downstream: bool = True) -> None:
        """Swallow everything that goes that way, ends and resets too. Connections stay open; new ones are accepted and
        receive nothing."""
        self._up.is_black_hole, self._down.is_black_hole = upstream, downstream

    async def reset(self) -> None:
        """Reset every connection now. New ones work as before."""
        await self._reset(set(self._connections))

    async def refuse(self) -> None:
        """Reset every connection now, and each new one as soon as it arrives."""
        self._refuses = True
        await self.reset()

    async def point_at(self, target: str) -> None:
        """Send new connections to another target. Open connections stay; `reset` moves their clients."""
        self._target = target

    async def heal(self) -> None:
        """End all faults. Reset the connections that lost bytes in a black hole."""
        self._refuses = False
        for way in (self._up, self._down):
            way.heal()
        await self._reset({connection for connection in self._connections if connection.has_lost})

    async def _reset(self, connections: set[_Connection]) -> None:
        for connection in connections:
            connection.reset()
        await asyncio.gather(*(connection.task for connection in connections), return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.num_accepted += 1
        connection = _Connection(task=task, writers=[writer])
        self._connections.add(connection)
        try:
            if self._refuses:
                connection.reset()
            else:
                await self._join(connection, reader, writer)
        except asyncio.CancelledError:
            # A reset does this, and only the proxy awaits the task.
            pass
        finally:
            self._connections.discard(connection)
            for each in connection.writers:
                each.close()

    async def _join(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Relay until both ends have closed, or one of them is gone. In a black hole neither end learns of that."""
        try:
            if self._up.is_black_hole:
                await self._pump(connection, reader, None, self._up)
            else:
                host, _, port = self._target.rpartition(":")
                answers, requests = await asyncio.open_connection(host, int(port))
                connection.writers.append(requests)
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(self._pump(connection, reader, requests, self._up))
                    ways.create_task(self._pump(connection, answers, writer, self._down))
        except* OSError:
            if self._up.is_black_hole or self._down.is_black_hole:
                connection.has_lost = True
            else:
                connection.reset()
        if connection.has_lost and not connection.is_reset:
            await asyncio.Event().wait()

    async def _pump(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter | None,
        way: _Way,
    ) -> None:
        in_flight = asyncio.Queue[tuple[float, bytes]](IN_FLIGHT_CHUNKS)
        now = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_deliver(connection, in_flight, writer, way))
            while chunk := await reader.read(CHUNK_BYTES):
                await in_flight.put((way.arrival(len(chunk), now()), chunk))
            await in_flight.put((way.arrival(0, now()), b""))


async def _deliver(
    connection: _Connection,
    in_flight: "asyncio.Queue[tuple[float, bytes]]",
    writer: asyncio.StreamWriter | None,
    way: _Way,
) -> None:
    """In order. The empty chunk is the sender's end."""
    chunk = None
    while chunk != b"":
        due, chunk = await in_flight.get()
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        if writer is None or way.is_black_hole or connection.has_lost:
            # After a hole nothing may follow: the receiver would take it for what it missed.
            connection.has_lost = True
        elif chunk:
            writer.write(chunk)
            await writer.drain()
        else:
            writer.write_eof()


class ChaosProxyThread:
    """The same for tests that are not asynchronous: `with ChaosProxyThread("host:port") as proxy`, and no `await`."""

    def __init__(self, target: str) -> None:
        self._proxy = ChaosProxy(target)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._proxy.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._proxy.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        return self._proxy.address

    @property
    def num_accepted(self) -> int:
        return self._proxy.num_accepted

    @property
    def num_open(self) -> int:
        return self._proxy.num_open

    def latency(self, seconds: float, jitter: float = 0.0) -> None:
        self._run(self._proxy.latency(seconds, jitter))

    def bandwidth(self, bytes_per_second: float) -> None:
        self._run(self._proxy.bandwidth(bytes_per_second))

    def black_hole(self, upstream: bool = True, downstream: bool = True) -> None:
        self._run(self._proxy.black_hole(upstream, downstream))

    def reset(self) -> None:
        self._run(self._proxy.reset())

    def refuse(self) -> None:
        self._run(self._proxy.refuse())

    def point_at(self, target: str) -> None:
        self._run(self._proxy.point_at(target))

    def heal(self) -> None:
        self._run(self._proxy.heal())

    def _run(self, call: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result()
