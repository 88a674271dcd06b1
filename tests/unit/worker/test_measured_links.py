"""Links between workers are measured by trials and by pulls, and the load tells of them and of what is on its way."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain
from blockyard.proto.v1.session_pb2 import MeasureLink, PullEnd, PullRefusal, PullReply, PullRequest, ToWorker
from blockyard.worker.cache.block_tables import Loan
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineLoad
from blockyard.worker.scheduling import pulls
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.server import WorkerServer
from blockyard.worker.transfer import lender, receiver
from blockyard.worker.transfer.wire import MAX_REPLY_BYTES, TRIAL_BYTES, Connection

from .test_session import ROOT, Session
from .test_transfer import BLOCKS, LENGTH, Router, a_worker, check_idle, harmed, pull_from, transfer_port

BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4
PATIENCE_SECONDS = 20


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give trials the time that they need on a busy machine."""
    for_all_trials(monkeypatch, PATIENCE_SECONDS)
    monkeypatch.setattr(pulls, "LATE_SECONDS", 20.0)


def for_all_trials(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(receiver, "TRIAL_SECONDS", seconds)
    monkeypatch.setattr(lender, "TRIAL_SECONDS", seconds)


async def load_of(worker: WorkerServer) -> EngineLoad:
    return await asyncio.wrap_future(worker._engine.call(lambda engine: engine.load()))


async def until(worker: WorkerServer, is_so: Callable[[EngineLoad], bool]) -> EngineLoad:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not is_so(load := await load_of(worker)):  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.01)
        return load


async def measure(session: Session, source: WorkerServer, **changes: str) -> None:
    port = await transfer_port(source, "")
    order = {"address": f"127.0.0.1:{port}", "incarnation": source.incarnation}
    await session.call.write(ToWorker(measure_link=MeasureLink(**(order | changes))))


async def until_taken(session: Session) -> None:
    """Until the worker has taken all messages so far."""
    await session.call.write(ToWorker(ping={"nonce": 1}))
    await session.read_until("pong")


async def test_a_trial_measures_a_link_and_routers_hear_of_it() -> None:
    async with a_worker("w0", secret="") as source, a_worker("w1", secret="") as destination:
        async with Session(destination.address, "") as session:
            hello = await session.read_until("hello")
            assert hello.block_bytes == BLOCK_BYTES
            assert (hello.load.pull_setup_seconds, hello.load.pull_bytes_per_second) == (0, 0)
            begun = time.monotonic()
            await measure(session, source)
            while not (load := (await session.read_until("step")).load).pull_bytes_per_second:
                pass
            assert 0 < load.pull_setup_seconds < time.monotonic() - begun
            assert (load.pulled_blocks, load.failed_pulls) == (0, 0), "a trial is no pull"
        assert (await load_of(source)).lent_blocks == 0
        await check_idle(source)
        await check_idle(destination)


async def test_a_long_step_of_the_source_does_not_make_a_trial_late() -> None:
    async with a_worker("w0", secret="") as source, a_worker("w1", secret="") as destination:
        port, has_ended = await transfer_port(source, ""), threading.Event()
        step = source._engine.call(lambda engine: has_ended.wait(PATIENCE_SECONDS))
        try:
            async with Session(destination.address, "") as session:
                await session.read_until("hello")
                order = MeasureLink(address=f"127.0.0.1:{port}", incarnation=source.incarnation)
                await session.call.write(ToWorker(measure_link=order))
                while not (await session.read_until("step")).load.pull_bytes_per_second:
                    pass
            assert not step.done()
        finally:
            has_ended.set()


async def test_what_is_measured_is_not_measured_again() -> None:
    sent = 0

    def count(data: bytes, offset: int) -> bytes:
        nonlocal sent
        sent += len(data)
        return data

    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(a_worker("w0", secret=""))
        destination = await stack.enter_async_context(a_worker("w1", secret=""))
        address = await stack.enter_async_context(harmed(source, count))
        session = await stack.enter_async_context(Session(destination.address, ""))
        for _ in range(3):
            await measure(session, source, address=address)
        load = await until(destination, lambda load: load.pull_bytes_per_second > 0)
        for _ in range(3):
            await measure(session, source, address=address)
        await until_taken(session)
        assert await load_of(destination) == load
        assert TRIAL_BYTES <= sent < 1.01 * TRIAL_BYTES, "one trial"


async def test_a_pull_is_a_measurement_and_counts_on_both_ends() -> None:
    async with a_worker("w0", secret="") as source, a_worker("w1", secret="") as destination:
        async with Router(source, "") as router:
            await router.ask(1)
        async with Router(destination, "") as router:
            await router.ask(1, pull=await pull_from(source, ""))
            report = router.reports[1]
            assert report.end == PullEnd.PULL_END_WHOLE
            load = await load_of(destination)
            assert report.setup_seconds <= load.pull_setup_seconds
            assert load.pull_bytes_per_second == pytest.approx(report.num_bytes / report.transfer_seconds)
            assert (load.pulled_blocks, load.pulling_bytes, load.failed_pulls) == (BLOCKS, 0, 0)
            await measure(router, source)
            await until_taken(router)
            assert await load_of(destination) == load, "no trial after a pull"
        load = await until(source, lambda load: load.lent_blocks == BLOCKS)
        assert load.lending_bytes == 0


async def test_what_is_still_to_be_sent_is_load_of_the_source() -> None:
    async with a_worker("w0", secret="") as source:
        async with Router(source, "") as router:
            await router.ask(1)
        names = [BlockName(name) for name in chain(ROOT, [5] * LENGTH, 16)]

        def lend(engine: Engine) -> tuple[Loan, EngineLoad]:
            loan = engine.lend(names, first=2)
            return loan, engine.load()

        def end(engine: Engine) -> EngineLoad:
            engine.end_loan(loan)
            return engine.load()

        loan, load = await asyncio.wrap_future(source._engine.call(lend))
        assert load.lending_bytes == (BLOCKS - 2) * BLOCK_BYTES
        loan.num_unsent, loan.num_sent = 7, BLOCKS - 2 - 7
        assert (await load_of(source)).lending_bytes == 7 * BLOCK_BYTES
        load = await asyncio.wrap_future(source._engine.call(end))
        assert (load.lending_bytes, load.lent_blocks) == (0, BLOCKS - 2 - 7)


async def test_a_pull_cut_short_by_its_deadline_makes_the_link_slower() -> None:
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(a_worker("w0", secret=""))
        destination = await stack.enter_async_context(a_worker("w1", secret=""))
        there = await stack.enter_async_context(Router(source, ""))
        here = await stack.enter_async_context(Router(destination, ""))
        await there.ask(1)
        await measure(here, source)
        before = await until(destination, lambda load: load.pull_bytes_per_second > 0)
        address = await stack.enter_async_context(harmed(source, lambda data, _: data, delay_seconds=0.05))
        pull = await pull_from(source, "", address=address, seconds=3.0)
        await here.submit(1, length=LENGTH, pull=pull)
        await until(destination, lambda load: 0 < load.pulling_bytes < BLOCKS * BLOCK_BYTES)
        await here.tokens_of(1)
        assert here.reports[1].end == PullEnd.PULL_END_LATE
        after = await load_of(destination)
        assert after.pull_bytes_per_second < before.pull_bytes_per_second / 2
        assert (after.failed_pulls, after.pulling_bytes) == (1, 0)
        await check_idle(source)


@pytest.mark.parametrize("changes", [{"incarnation": "another"}, {"address": "127.0.0.1:1"}, {"address": ""}])
async def test_a_link_that_cannot_be_measured_stays_unknown(changes: dict[str, str]) -> None:
    async with (
        a_worker("w0", secret="") as source,
        a_worker("w1", secret="") as destination,
        Session(destination.address, "") as session,
    ):
        await measure(session, source, **changes)
        await until_taken(session)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while destination._exchange._receiver._is_in_trial:  # noqa: ASYNC110 - another thread
                await asyncio.sleep(0.01)
        assert (await load_of(destination)).pull_bytes_per_second == 0
        await measure(session, source)
        await until(destination, lambda load: load.pull_bytes_per_second > 0)


async def test_a_worker_without_a_host_cache_measures_no_link() -> None:
    async with (
        a_worker("w0", secret="") as source,
        a_worker("w1", secret="", host_cache_gib=0.0) as destination,
        Session(destination.address, "") as session,
    ):
        await measure(session, source)
        await until_taken(session)
        assert not destination._exchange._receiver._is_in_trial


async def asked(worker: WorkerServer, **request: Any) -> tuple[PullReply, bytes]:
    """Send a request to a worker's transfer port. Return its answer, and the bytes that follow."""
    port = await transfer_port(worker, "")
    facts = {"incarnation": worker.incarnation, "layout": worker._exchange._receiver._layout, "seconds": 5.0}

    def talk() -> tuple[PullReply, bytes]:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            connection = Connection(sock)
            connection.deadline = time.monotonic() + PATIENCE_SECONDS
            connection.send(PullRequest(**(facts | request)))
            reply = connection.receive(PullReply, MAX_REPLY_BYTES)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(PATIENCE_SECONDS)
            return reply, b"".join(iter(lambda: sock.recv(1 << 20), b""))

    return await asyncio.to_thread(talk)


async def test_a_trial_is_bounded_and_refused_as_any_request() -> None:
    async with a_worker("w0", secret="") as worker:
        reply, sent = await asked(worker, trial_bytes=2**32 - 1)
        assert (reply.refusal, reply.num_blocks) == (0, -(-TRIAL_BYTES // BLOCK_BYTES))
        assert len(sent) == reply.num_blocks * (8 + BLOCK_BYTES)
        assert (await asked(worker, trial_bytes=1))[0].num_blocks == 1
        for changes, refusal in (
            ({"incarnation": "another"}, PullRefusal.PULL_REFUSAL_INCARNATION),
            ({"layout": "another"}, PullRefusal.PULL_REFUSAL_LAYOUT),
            ({"names": b"1" * 16}, PullRefusal.PULL_REFUSAL_INVALID),
            ({"trial_bytes": 0}, PullRefusal.PULL_REFUSAL_INVALID),
        ):
            reply, sent = await asked(worker, **({"trial_bytes": TRIAL_BYTES} | changes))
            assert (reply, sent) == (PullReply(refusal=refusal), b"")
        await check_idle(worker)


async def test_a_link_so_slow_that_no_block_arrives_in_time_is_measured_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for_all_trials(monkeypatch, 3.0)
    async with (
        a_worker("w0", secret="") as source,
        a_worker("w1", secret="") as destination,
        Session(destination.address, "") as session,
        harmed(source, lambda data, _: data, delay_seconds=0.5) as address,
    ):
        await measure(session, source, address=address)
        load = await until(destination, lambda load: load.pull_bytes_per_second > 0)
        assert load.pull_bytes_per_second < BLOCK_BYTES / 3, "a kilobyte each 0.5 s"
