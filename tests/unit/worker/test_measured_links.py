"""Links between workers are measured by trials and by pulls, and the load tells of them and of what is on its way."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain
from blockyard.proto.v1.session_pb2 import PullEnd, PullRefusal, PullReply, PullRequest
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineLoad
from blockyard.worker.scheduling import pulls
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.server import WorkerServer
from blockyard.worker.transfer import lender, receiver
from blockyard.worker.transfer.wire import MAX_REPLY_BYTES, TRIAL_BYTES, Connection

from .pulling import BLOCKS, LENGTH, a_worker, check_idle, harmed, pull_from, transfer_port, two_workers
from .serving import BLOCK_BYTES, ROOT, Session, in_engine

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
    return await in_engine(worker, lambda engine: engine.load())


async def until(worker: WorkerServer, is_so: Callable[[EngineLoad], bool]) -> EngineLoad:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not is_so(load := await load_of(worker)):  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.01)
        return load


async def until_measured(worker: WorkerServer) -> EngineLoad:
    return await until(worker, lambda load: load.pull_bytes_per_second > 0)


async def measure(session: Session, source: WorkerServer, **changes: str) -> None:
    port = await transfer_port(source, "")
    order = {"address": f"127.0.0.1:{port}", "incarnation": source.incarnation}
    await session.write(measure_link=order | changes)


async def test_a_trial_measures_a_link_and_routers_hear_of_it_also_in_a_long_step_of_the_source() -> None:
    async with two_workers() as (source, destination, _, here):
        hello = await here.read_until("hello")
        assert hello.block_bytes == BLOCK_BYTES
        assert (hello.load.pull_setup_seconds, hello.load.pull_bytes_per_second) == (0, 0)
        port, has_ended = await transfer_port(source, ""), threading.Event()
        step = source._engine.call(lambda engine: has_ended.wait(PATIENCE_SECONDS))
        begun = time.monotonic()
        try:
            order = {"address": f"127.0.0.1:{port}", "incarnation": source.incarnation}
            await here.write(measure_link=order)
            load = (await here.step_with(lambda step: step.load.pull_bytes_per_second)).load
            assert not step.done()
        finally:
            has_ended.set()
        assert 0 < load.pull_setup_seconds < time.monotonic() - begun
        assert (load.pulled_blocks, load.failed_pulls) == (0, 0), "a trial is no pull"
        assert (await load_of(source)).lent_blocks == 0
        await check_idle(source, destination)


async def test_what_is_measured_is_not_measured_again() -> None:
    sent = 0

    def count(data: bytes, offset: int) -> bytes:
        nonlocal sent
        sent += len(data)
        return data

    async with two_workers() as (source, destination, _, here), harmed(source, count) as address:
        for _ in range(3):
            await measure(here, source, address=address)
        load = await until_measured(destination)
        for _ in range(3):
            await measure(here, source, address=address)
        await here.until_taken()
        assert await load_of(destination) == load
        assert TRIAL_BYTES <= sent < 1.01 * TRIAL_BYTES, "one trial"


async def test_a_pull_is_a_measurement_and_counts_on_both_ends() -> None:
    async with two_workers() as (source, destination, there, here):
        await there.ask(1)
        await here.ask(1, pull=await pull_from(source, ""))
        report = here.reports[1]
        assert report.end == PullEnd.PULL_END_WHOLE
        load = await load_of(destination)
        assert report.setup_seconds <= load.pull_setup_seconds
        assert load.pull_bytes_per_second == pytest.approx(report.num_bytes / report.transfer_seconds)
        assert (load.pulled_blocks, load.pulling_bytes, load.failed_pulls) == (BLOCKS, 0, 0)
        await measure(here, source)
        await here.until_taken()
        assert await load_of(destination) == load, "no trial after a pull"
        load = await until(source, lambda load: load.lent_blocks == BLOCKS)
        assert load.lending_bytes == 0


async def test_what_is_still_to_be_sent_is_load_of_the_source() -> None:
    async with two_workers() as (source, _, there, _):
        await there.ask(1)
        names = [BlockName(name) for name in chain(ROOT, [5] * LENGTH, 16)]
        loan = await in_engine(source, lambda engine: engine.lend(names, first=2))
        assert (await load_of(source)).lending_bytes == (BLOCKS - 2) * BLOCK_BYTES
        loan.num_unsent, loan.num_sent = 7, BLOCKS - 2 - 7
        assert (await load_of(source)).lending_bytes == 7 * BLOCK_BYTES

        def end(engine: Engine) -> EngineLoad:
            engine.end_loan(loan)
            return engine.load()

        load = await in_engine(source, end)
        assert (load.lending_bytes, load.lent_blocks) == (0, BLOCKS - 2 - 7)


async def test_a_pull_cut_short_by_its_deadline_makes_the_link_slower() -> None:
    async with two_workers() as (source, destination, there, here):
        await there.ask(1)
        await measure(here, source)
        before = await until_measured(destination)
        async with harmed(source, delay_seconds=0.05) as address:
            pull = await pull_from(source, "", address=address, seconds=2.0)
            await here.submit(1, length=LENGTH, pull=pull)
            await until(destination, lambda load: 0 < load.pulling_bytes < BLOCKS * BLOCK_BYTES)
            await here.tokens_of(1)
        assert here.reports[1].end == PullEnd.PULL_END_LATE
        after = await load_of(destination)
        assert after.pull_bytes_per_second < before.pull_bytes_per_second / 2
        assert (after.failed_pulls, after.pulling_bytes) == (1, 0)
        await check_idle(source)


async def until_no_trial(worker: WorkerServer) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while worker._exchange._receiver._is_in_trial:  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.01)


async def test_a_link_that_cannot_be_measured_stays_unknown_and_is_measured_later() -> None:
    async with two_workers() as (source, destination, _, here):
        changes: tuple[dict[str, str], ...] = (
            {"incarnation": "another"},
            {"address": "127.0.0.1:1"},
            {"address": ""},
        )
        for change in changes:
            await measure(here, source, **change)
            await here.until_taken()
            await until_no_trial(destination)
            assert (await load_of(destination)).pull_bytes_per_second == 0, change
        await measure(here, source)
        await until_measured(destination)


async def test_a_worker_without_a_host_cache_measures_no_link() -> None:
    async with two_workers(host_cache_gib=0.0) as (source, destination, _, here):
        await measure(here, source)
        await here.until_taken()
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
    for_all_trials(monkeypatch, 2.0)
    async with (
        two_workers() as (source, destination, _, here),
        harmed(source, delay_seconds=0.5) as address,
    ):
        await measure(here, source, address=address)
        load = await until_measured(destination)
        assert load.pull_bytes_per_second < BLOCK_BYTES / 2, "a kilobyte each 0.5 s"
