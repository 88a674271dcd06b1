"""Blocks that travel between two workers: whatever happens to a transfer, tokens are those of a worker alone."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain, pack_tokens
from blockyard.proto.v1 import session_pb2
from blockyard.proto.v1.session_pb2 import PullEnd, PullReport
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.engine import Engine
from blockyard.worker.scheduling import pulls
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.server import WorkerServer
from blockyard.worker.transfer import rules

from .checkpoints import shared_checkpoint
from .test_session import ROOT, SECRET, Session

KV_BYTES = 128 * 2 * 3 * 2 * 16 * 16 * 4
LENGTH = 200
"""Tokens of a prompt: 12 full blocks, and part of another one."""
BLOCKS = 12


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait until their pulls have ended, and so hear of each, also where its thread gets no processor."""
    monkeypatch.setattr(pulls, "LATE_SECONDS", 20.0)


@asynccontextmanager
async def a_worker(name: str, *, secret: str = SECRET, **changes: Any) -> AsyncIterator[WorkerServer]:
    engine = {
        "model": str(shared_checkpoint("LlamaForCausalLM")),
        "kv_cache_memory": KV_BYTES,
        "host_cache_gib": KV_BYTES / 2**30,
        "device": "cpu",
        "deterministic": True,
    }
    config = WorkerConfig(engine=EngineConfig(**(engine | changes)), worker_id=name, cluster_secret=secret)
    worker = WorkerServer(config)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop(0)


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

    return await asyncio.wrap_future(worker._engine.call(read))


async def check_idle(worker: WorkerServer) -> None:
    """Check that the worker keeps nothing for a transfer, once those under way have ended."""

    def is_idle(engine: Engine) -> bool:
        engine.scheduler.check_invariants()
        host_cache, tables = engine.scheduler.host_cache, engine.scheduler.tables
        assert host_cache is not None
        return not (
            len(engine.scheduler.pulls) or host_cache._reserved or host_cache._reading or tables.num_lent
        )

    async with asyncio.timeout(10):
        while not await asyncio.wrap_future(worker._engine.call(is_idle)):  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("secret", [SECRET, ""])
async def test_a_pulled_prefix_gives_the_same_tokens_and_has_the_same_bits(secret: str) -> None:
    async with a_worker("w0", secret=secret) as source, a_worker("w1", secret=secret) as destination:
        async with Router(source, secret) as router:
            expected = await router.ask(1)
        async with Router(destination, secret) as router:
            assert await router.ask(1, pull=await pull_from(source, secret)) == expected
            (report,) = router.reports.values()
            assert (report.end, report.num_blocks) == (PullEnd.PULL_END_WHOLE, BLOCKS)
            assert report.num_bytes == BLOCKS * 2 * 3 * 2 * 16 * 16 * 4
            assert router.cached == {1: BLOCKS * 16}
            assert await router.ask(2, pull=await pull_from(source, secret)) == expected
            assert list(router.reports) == [1], "what is here is not fetched again"
        here, there = await bytes_of_blocks(destination), await bytes_of_blocks(source)
        assert len(here) == BLOCKS
        assert here == there[:BLOCKS]
        await check_idle(source)
        await check_idle(destination)


@dataclass
class Proxy:
    """A TCP proxy before a worker's transfer port, which harms what the worker sends."""

    port: int
    harm: Callable[[bytes, int], bytes | None]
    """Takes bytes of the worker and their offset in the connection. Returns what to pass on, None to end it."""
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
async def harmed(
    worker: WorkerServer,
    harm: Callable[[bytes, int], bytes | None],
    *,
    delay_seconds: float = 0.0,
    undelayed_bytes: int = 0,
) -> AsyncIterator[str]:
    """Yield the address of a proxy before the worker's transfer port."""
    proxy = Proxy(await transfer_port(worker, ""), harm, delay_seconds, undelayed_bytes)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def flip_at(position: int) -> Callable[[bytes, int], bytes | None]:
    def harm(data: bytes, offset: int) -> bytes | None:
        index = position - offset
        if 0 <= index < len(data):
            return data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
        return data

    return harm


def cut_at(position: int) -> Callable[[bytes, int], bytes | None]:
    return lambda data, offset: data if offset + len(data) <= position else None


def left_out_at(position: int) -> Callable[[bytes, int], bytes | None]:
    """The byte at this position is missing."""
    return lambda data, offset: data[: max(position - offset, 0)] + data[max(position - offset + 1, 0) :]


def doubled_at(position: int) -> Callable[[bytes, int], bytes | None]:
    return lambda data, offset: data if position - offset not in range(len(data)) else data + data


FRAME_BYTES = 8 + 2 * 3 * 2 * 16 * 16 * 4
"""A block and its header."""


@pytest.mark.ci
@pytest.mark.fault(62)
@pytest.mark.parametrize("harm", [flip_at, cut_at, left_out_at, doubled_at])
async def test_whatever_happens_to_the_bytes_tokens_are_right_and_nothing_waits(
    harm: Callable[[int], Callable[[bytes, int], bytes | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each boundary of a frame, beside it, and anywhere."""
    monkeypatch.setattr(rules, "AVOIDED_SECONDS", dict.fromkeys(rules.AVOIDED_SECONDS, 0.0))
    chance = random.Random(3)
    boundaries = [6 + FRAME_BYTES * number for number in (0, 1, 5, BLOCKS)]
    positions = [0, 4, 5, *(boundary + beside for boundary in boundaries[:-1] for beside in (-1, 0, 4, 8))]
    positions += [chance.randrange(boundaries[-1]) for _ in range(8)]
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(a_worker("w0", secret=""))
        destination = await stack.enter_async_context(a_worker("w1", secret=""))
        there = await stack.enter_async_context(Router(source, ""))
        here = await stack.enter_async_context(Router(destination, ""))
        for handle, position in enumerate(positions, start=1):
            token = 5 + handle
            expected = await there.ask(handle, token=token)
            async with harmed(source, harm(position)) as address:
                pull = await pull_from(source, "", address=address, seconds=1.0)
                assert await here.ask(handle, token=token, pull=pull) == expected
            report = here.reports[handle]
            intact = max(position - 6, 0) // FRAME_BYTES
            assert report.num_blocks <= BLOCKS if harm is doubled_at else report.num_blocks <= intact, (
                position
            )
            assert here.cached[handle] == report.num_blocks * 16
            await check_idle(destination)
        await check_idle(source)


@pytest.mark.fault(68)
async def test_a_slow_source_delays_a_request_no_longer_than_its_pull_may_take() -> None:
    async with a_worker("w0", secret="") as source, a_worker("w1", secret="") as destination:
        async with Router(source, "") as router:
            expected = await router.ask(1)
        async with Router(destination, "") as router:
            first_block = 6 + FRAME_BYTES
            async with harmed(
                source, lambda data, _: data, delay_seconds=0.02, undelayed_bytes=first_block
            ) as address:
                # Each later block takes 0.26 s at least, so not all of them can arrive.
                pull = await pull_from(source, "", address=address, seconds=2.0)
                assert await router.ask(1, pull=pull) == expected
            report = router.reports[1]
            assert report.end == PullEnd.PULL_END_LATE
            assert 0 < report.num_blocks < BLOCKS, "what has arrived is used"
            assert router.cached == {1: report.num_blocks * 16}
        await check_idle(source)
        await check_idle(destination)


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"incarnation": "another"}, PullEnd.PULL_END_REFUSED),
        ({"address": "127.0.0.1:1"}, PullEnd.PULL_END_UNREACHABLE),
        ({"address": "nowhere"}, PullEnd.PULL_END_UNREACHABLE),
        ({"seconds": 1e-9}, PullEnd.PULL_END_LATE),
        ({"num_blocks": 4}, PullEnd.PULL_END_WHOLE),
        ({"num_blocks": 0}, None),
        ({"seconds": 0.0}, None),
    ],
)
async def test_an_order_that_leads_to_nothing_costs_only_the_computing(
    changes: dict[str, Any], end: PullEnd | None
) -> None:
    async with a_worker("w0") as source, a_worker("w1") as destination:
        async with Router(source) as router:
            expected = await router.ask(1)
        async with Router(destination) as router:
            assert await router.ask(1, pull=await pull_from(source, **changes)) == expected
            assert [report.end for report in router.reports.values()] == ([] if end is None else [end])


@pytest.mark.fault(63)
async def test_a_source_that_lacks_blocks_sends_those_that_it_has() -> None:
    async with a_worker("w0") as source, a_worker("w1") as destination:
        async with Router(source) as router:
            await router.submit(1, length=100, sampling={"seed": 7})
            await router.tokens_of(1)
        async with Router(destination) as router:
            await router.ask(1, pull=await pull_from(source))
            report = router.reports[1]
            assert (report.end, report.num_blocks) == (PullEnd.PULL_END_FEWER, 6)


@pytest.mark.fault(67)
async def test_workers_of_other_layouts_or_secrets_lend_nothing() -> None:
    async with a_worker("w0", deterministic=False, dtype="bfloat16") as other, a_worker("w1") as destination:
        async with Router(other) as router:
            await router.ask(1)
        async with Router(destination) as router:
            await router.ask(1, pull=await pull_from(other))
            assert router.reports[1].end == PullEnd.PULL_END_REFUSED
    async with (
        a_worker("w0", secret="another") as stranger,
        a_worker("w1") as destination,
        Router(destination) as router,
    ):
        await router.ask(1, pull=await pull_from(stranger, "another"))
        assert router.reports[1].end == PullEnd.PULL_END_UNREACHABLE


@pytest.mark.fault(65)
async def test_a_cancelled_request_ends_its_pull_and_frees_its_slots() -> None:
    async with a_worker("w0", secret="") as source, a_worker("w1", secret="") as destination:
        async with Router(source, "") as router:
            await router.ask(1)
        async with harmed(source, lambda data, _: data, delay_seconds=0.2) as address:
            pull = await pull_from(source, "", address=address, seconds=30.0)
            async with Router(destination, "") as router:
                await router.submit(1, length=LENGTH, pull=pull)
                await asyncio.sleep(0.3)
        await check_idle(destination)
        await check_idle(source)


@pytest.mark.fault(69)
async def test_two_requests_for_one_prefix_wait_for_one_pull() -> None:
    async with a_worker("w0", secret="") as source, a_worker("w1", secret="") as destination:
        async with Router(source, "") as router:
            expected = await router.ask(1)
        async with (
            Router(destination, "") as router,
            harmed(source, lambda data, _: data, delay_seconds=0.005) as address,
        ):
            pull = await pull_from(source, "", address=address)
            for handle in (1, 2):
                await router.submit(handle, length=LENGTH, sampling={"seed": 7}, pull=pull)
            assert await router.tokens_of(1, 2) == {1: expected, 2: expected}
            assert list(router.reports) == [1]
            assert router.cached == {1: BLOCKS * 16, 2: BLOCKS * 16}


async def test_a_transfer_port_closes_on_what_is_no_request() -> None:
    async with a_worker("w0", secret="") as worker:
        port = await transfer_port(worker, "")
        for sent in (b"\xff" * 8, b"\x03\0\0\0\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        await check_idle(worker)


async def test_a_worker_lends_at_most_its_share() -> None:
    async with a_worker("w0", lend_share=0.05) as source, a_worker("w1") as destination:
        async with Router(source) as router:
            await router.ask(1)
        async with Router(destination) as router:
            await router.ask(1, pull=await pull_from(source))
            assert (router.reports[1].end, router.reports[1].num_blocks) == (PullEnd.PULL_END_FEWER, 6)


async def test_a_replay_fetches_blocks_of_generated_tokens_and_publishes_each_stride() -> None:
    async with (
        a_worker("w0", lend_share=0.5) as source,
        a_worker("w1", index_stride_tokens=32) as destination,
    ):
        published: set[bytes] = set()
        destination._service.on_changes = lambda result: published.update(result.changes.anywhere_stored)
        async with Router(source) as router:
            generated = await router.ask(1, max_tokens=60)
        tokens = [5] * LENGTH + generated[:40]
        async with Router(destination) as router:
            pull = await pull_from(source, num_blocks=(len(tokens) - 1) // 16)
            following = await router.ask(1, max_tokens=60, token_ids=pack_tokens(tokens), pull=pull)
            assert following[-20:] == generated[40:]
            assert router.reports[1].num_blocks == 14
            assert router.cached == {1: LENGTH}, "generated tokens are no tokens of the prompt"
        assert published == set(chain(ROOT, [5] * LENGTH + generated[:-1], 16)[1::2])
        await check_idle(destination)


async def test_a_request_that_waits_for_the_pull_of_another_then_fetches_its_own_blocks() -> None:
    async with (
        a_worker("w0", secret="", lend_share=0.5) as source,
        a_worker("w1", secret="") as destination,
        Router(source, "") as there,
        Router(destination, "") as here,
        harmed(source, lambda data, _: data, delay_seconds=0.002) as address,
    ):
        other = [5] * 96 + [6] * 104
        names = b"".join((ROOT, *chain(ROOT, other, 16)))
        changes: dict[int, dict[str, Any]] = {
            1: {},
            2: {"token_ids": pack_tokens(other), "block_names": names},
        }
        expected = {handle: await there.ask(handle, **changes[handle]) for handle in changes}
        pull = await pull_from(source, "", address=address)
        for handle in changes:
            await here.submit(handle, length=LENGTH, sampling={"seed": 7}, pull=pull, **changes[handle])
        assert await here.tokens_of(1, 2) == expected
        assert {handle: report.num_blocks for handle, report in here.reports.items()} == {1: 12, 2: 6}
        assert here.cached == {1: BLOCKS * 16, 2: BLOCKS * 16}
        await check_idle(destination)
