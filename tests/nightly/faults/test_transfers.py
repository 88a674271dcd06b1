"""Rows 60, 61, 64 and 66: a worker that dies, freezes or restarts in a pull. Connections have TLS, as in a cluster."""

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from blockyard.proto.v1 import session_pb2
from blockyard.proto.v1.session_pb2 import Hello, Ping, PullEnd, ToWorker

from tests.system.processes import SECRET, Process, Processes, free_port, processes
from tests.unit.worker.checkpoints import make_checkpoint
from tests.unit.worker.test_transfer import BLOCKS, Router

from .transfer_rig import BLOCK_BYTES, KV_SHAPE, PREFIX_BYTES, tapped

OPTIONS = ("--device", "cpu", "--deterministic", "--kv-cache-memory", str(64 * BLOCK_BYTES))
LENDING = ("--host-cache-gib", str(64 * BLOCK_BYTES / 2**30), "--lend-share", "0.5")
SECONDS = 3.0
"""Time that a pull may take."""
HUNDREDS_MS = 10 * 0.25
"""Ten times the time within which a pull must end after its deadline (scheduling/pulls.py)."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("transfers")
    model = make_checkpoint(folder / "model", "LlamaForCausalLM", **KV_SHAPE)
    with processes(folder) as cluster:
        for name in ("w0", "w1"):
            port = ("--transfer-port", str(free_port()))
            cluster.add_worker(name, *OPTIONS, *LENDING, *port, model=model)
        cluster.start(*cluster.workers.values())
        yield cluster


@pytest.fixture
def source(cluster: Processes) -> Process:
    return _serving(cluster, "w0")


@pytest.fixture
def destination(cluster: Processes) -> Process:
    return _serving(cluster, "w1")


def _serving(cluster: Processes, name: str) -> Process:
    worker = cluster.workers[name]
    if not worker.is_running:
        cluster.start(worker)
    return worker


class Peer(Router):
    """A router's session with a worker that is a process."""

    hello: Hello

    def __init__(self, worker: Process) -> None:
        super().__init__(worker, SECRET)  # type: ignore[arg-type] # it has an address too

    async def __aenter__(self) -> "Peer":
        await super().__aenter__()
        self.hello = await self.read_until("hello")
        return self

    def order(self, **changes: Any) -> session_pb2.Pull:
        """Return the order to pull from this worker."""
        order = {
            "address": f"127.0.0.1:{self.hello.transfer_port}",
            "incarnation": self.hello.incarnation,
            "num_blocks": BLOCKS,
            "seconds": SECONDS,
        }
        return session_pb2.Pull(**(order | changes))

    async def used_blocks(self) -> int:
        await self.call.write(ToWorker(ping=Ping(nonce=1)))
        return int((await self.read_until("pong")).load.used_blocks)


async def until_unused(worker: Peer) -> float:
    """Return the seconds until the worker's blocks are in no use: nothing runs, and nothing is lent."""
    begun = time.monotonic()
    async with asyncio.timeout(10):
        while await worker.used_blocks():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.002)
    return time.monotonic() - begun


async def _harmed_pull(
    source: Process, destination: Process, position: int, number: signal.Signals, token: int
) -> tuple[session_pb2.PullReport, float]:
    """Pull a prompt whose source gets a signal at this byte. Check the tokens; return the report and the seconds."""
    async with Peer(source) as there, Peer(destination) as here:
        expected = await there.ask(1, token=token)

        async def harm() -> None:
            source.signal(number)

        async with tapped(there.hello.transfer_port, position, harm) as tap:
            begun = time.monotonic()
            assert await here.ask(1, token=token, pull=there.order(address=tap.address)) == expected
            seconds = time.monotonic() - begun
        assert tap.passed >= position, "the signal came"
        report = here.reports[1]
        assert here.cached == {1: report.num_blocks * 16}, "complete blocks are used"
        assert report.num_blocks >= position // BLOCK_BYTES - 2, "what came before it is used"
        await until_unused(here)
    return report, seconds


@pytest.mark.fault(60)
async def test_a_source_killed_at_any_byte_costs_only_what_it_had_not_sent(
    source: Process, destination: Process, cluster: Processes, measured: dict[str, Any]
) -> None:
    chance, seconds = random.Random(60), []
    # In the handshake, at the answer, and within a block.
    for token, position in enumerate((300, chance.randrange(3000, PREFIX_BYTES // 2)), start=20):
        report, took = await _harmed_pull(source, destination, position, signal.SIGKILL, token)
        source.wait(10)
        assert report.end in (PullEnd.PULL_END_CUT, PullEnd.PULL_END_UNREACHABLE)
        assert report.num_blocks < BLOCKS
        seconds.append(took)
        cluster.start(source)
    measured.update(failed=0, recovery_seconds=max(seconds))


@pytest.mark.fault(61)
async def test_a_source_frozen_at_any_byte_costs_no_more_than_the_estimate(
    source: Process, destination: Process, measured: dict[str, Any]
) -> None:
    chance, seconds = random.Random(61), []
    for token, position in enumerate((300, chance.randrange(3000, PREFIX_BYTES // 2)), start=30):
        report, took = await _harmed_pull(source, destination, position, signal.SIGSTOP, token)
        source.signal(signal.SIGCONT)
        assert report.end in (PullEnd.PULL_END_LATE, PullEnd.PULL_END_UNREACHABLE)
        assert report.setup_seconds + report.transfer_seconds <= SECONDS + HUNDREDS_MS
        seconds.append(took)
    async with Peer(source) as there:
        await until_unused(there)
    measured.update(failed=0, recovery_seconds=max(seconds))


@pytest.mark.fault(64)
async def test_a_source_restarted_on_its_port_has_nothing_of_what_it_had(
    source: Process, destination: Process, cluster: Processes
) -> None:
    async with Peer(source) as there, Peer(destination) as here:
        expected = await there.ask(1, token=40)
        earlier = there.order()
        await there.ask(2, token=41)
        await here.ask(2, token=41, pull=there.order())
        assert here.reports[2].end == PullEnd.PULL_END_WHOLE, "a connection to it stays open"
    source.kill()
    cluster.start(source)
    async with Peer(source) as there, Peer(destination) as here:
        assert there.hello.transfer_port == int(earlier.address.rpartition(":")[2])
        assert await there.ask(1, token=40) == expected
        assert await here.ask(1, token=40, pull=earlier) == expected
        report = here.reports[1]
        assert (report.end, report.num_blocks) == (PullEnd.PULL_END_REFUSED, 0)
        await there.ask(3, token=42)
        await here.ask(3, token=42, pull=there.order())
        assert here.reports[3].end == PullEnd.PULL_END_WHOLE, "the new incarnation lends"


@pytest.mark.fault(66)
async def test_the_loans_of_a_killed_destination_end_at_once(
    source: Process, destination: Process, measured: dict[str, Any]
) -> None:
    async with Peer(source) as there:
        await there.ask(1, token=50)
        reached, killed = asyncio.Event(), asyncio.Event()
        async with Peer(destination) as here:
            # The destination freezes in the middle, so the source waits with its loan until the kill.
            async def freeze() -> None:
                destination.signal(signal.SIGSTOP)
                reached.set()
                await killed.wait()  # its buffers would take the rest

            async with tapped(there.hello.transfer_port, PREFIX_BYTES // 3, freeze) as tap:
                order = there.order(address=tap.address, seconds=50.0)
                await here.submit(1, length=200, token=50, pull=order)
                await asyncio.wait_for(reached.wait(), 20)
                await asyncio.sleep(0.5)
                assert await there.used_blocks() == BLOCKS, "they are lent"
                destination.kill()
                killed.set()
                took = await until_unused(there)
    assert took < HUNDREDS_MS
    measured.update(failed=0, recovery_seconds=took)
