"""Pulls between two workers of this process: routers that hear of them, and a proxy that harms their bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from blockyard.proto.naming.block_hash import chain
from blockyard.proto.v1 import session_pb2
from blockyard.proto.v1.session_pb2 import PullReport
from blockyard.worker.engine import Engine
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.server import WorkerServer

from .serving import BLOCK_BYTES, KV_BYTES, ROOT, SECRET, Session, engine_settings, in_engine, serving

LENGTH = 200
"""Tokens of a prompt: 12 full blocks, and part of another one."""
BLOCKS = 12
FRAME_BYTES = 8 + BLOCK_BYTES
"""A block and its header, as a transfer carries it."""


@asynccontextmanager
async def a_worker(name: str, *, secret: str = SECRET, **changes: Any) -> AsyncIterator[WorkerServer]:
    """Yield a worker that computes, and that sends and fetches blocks."""
    lending = {
        "engine": "model",
        "kv_cache_memory": 2 * KV_BYTES,
        "host_cache_gib": 2 * KV_BYTES / 2**30,
        "device": "cpu",
        "deterministic": True,
    }
    settings = engine_settings(**(lending | changes))
    async with serving(settings, worker_id=name, cluster_secret=secret) as worker:
        yield worker


class Router(Session):
    """A session that hears of pulls."""

    def __init__(self, worker: WorkerServer, secret: str = SECRET) -> None:
        super().__init__(worker.address, secret)
        self.reports: dict[int, PullReport] = {}
        self.cached: dict[int, int] = {}

    async def read_until(self, kind: str) -> Any:
        message = await super().read_until(kind)
        if kind == "step":
            self.reports.update({report.handle: report for report in message.pulls})
            self.cached.update(zip(message.handles, message.cached_tokens, strict=True))
        return message

    async def ask(self, handle: int, **changes: Any) -> list[int]:
        await self.submit(handle, **({"length": LENGTH, "sampling": {"seed": 7}} | changes))
        return (await self.tokens_of(handle))[handle]


@asynccontextmanager
async def two_workers(
    secret: str = "", lending: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[tuple[WorkerServer, WorkerServer, Router, Router]]:
    """Yield a source and a destination of pulls, and a router's session with each. `lending` changes the source."""
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(a_worker("w0", secret=secret, **(lending or {})))
        destination = await stack.enter_async_context(a_worker("w1", secret=secret, **changes))
        there = await stack.enter_async_context(Router(source, secret))
        here = await stack.enter_async_context(Router(destination, secret))
        yield source, destination, there, here


async def transfer_port(worker: WorkerServer, secret: str = SECRET) -> int:
    async with Session(worker.address, secret) as session:
        return int((await session.read_until("hello")).transfer_port)


async def pull_from(worker: WorkerServer, secret: str = SECRET, **changes: Any) -> session_pb2.Pull:
    order = {
        "address": f"127.0.0.1:{await transfer_port(worker, secret)}",
        "incarnation": worker.incarnation,
        "num_blocks": BLOCKS,
        "seconds": 10.0,
    }
    return session_pb2.Pull(**(order | changes))


async def bytes_of_blocks(worker: WorkerServer, token: int = 5) -> list[bytes]:
    """Return the bytes of the prompt's blocks that the worker has, wherever they lie."""
    names = [BlockName(name) for name in chain(ROOT, [token] * LENGTH, 16)]
    memory = worker._loaded.runner.transferable

    def read(engine: Engine) -> list[bytes]:
        loan = engine.scheduler.tables.lend(names)
        found = [b"".join(memory.block(block)) for block in loan.blocks]
        found += [bytes(memory.slot(slot)) for slot in loan.host_slots]
        engine.scheduler.tables.end_loan(loan)
        return found

    return await in_engine(worker, read)


async def check_idle(*workers: WorkerServer) -> None:
    """Check that the workers keep nothing for a transfer, once those under way have ended."""

    def is_idle(engine: Engine) -> bool:
        engine.scheduler.check_invariants()
        host_cache, tables = engine.scheduler.host_cache, engine.scheduler.tables
        assert host_cache is not None
        return not (
            len(engine.scheduler.pulls) or host_cache._reserved or host_cache._reading or tables.num_lent
        )

    for worker in workers:
        async with asyncio.timeout(10):
            while not await in_engine(worker, is_idle):  # noqa: ASYNC110 - another thread
                await asyncio.sleep(0.01)


Harm = Callable[[bytes, int], bytes | None]
"""Takes bytes of a worker and their offset in the connection. Returns what to pass on, None to end it."""


def unharmed(data: bytes, offset: int) -> bytes:
    return data


@dataclass
class Proxy:
    """A TCP proxy before a worker's transfer port, which harms what the worker sends."""

    port: int
    harm: Harm
    delay_seconds: float = 0.0
    undelayed_bytes: int = 0
    """Bytes of a connection that pass without the delay."""
    _tasks: set["asyncio.Task[Any]"] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._tasks.add(forth := asyncio.create_task(self._copy(reader, up_writer)))
        offset = 0
        while data := await up_reader.read(1000):
            await asyncio.sleep(self.delay_seconds if offset >= self.undelayed_bytes else 0.0)
            passed = self.harm(data, offset)
            offset += len(data)
            if passed is None:
                break
            writer.write(passed)
        forth.cancel()
        writer.close()
        up_writer.close()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)


@asynccontextmanager
async def harmed(worker: WorkerServer, harm: Harm = unharmed, **delays: Any) -> AsyncIterator[str]:
    """Yield the address of a proxy before the worker's transfer port."""
    proxy = Proxy(await transfer_port(worker, ""), harm, **delays)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def flip_at(position: int) -> Harm:
    def harm(data: bytes, offset: int) -> bytes | None:
        index = position - offset
        if 0 <= index < len(data):
            return data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
        return data

    return harm
