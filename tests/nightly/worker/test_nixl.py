"""Blocks that NIXL reads in another worker's memory, between real processes. Skipped where the package is missing.

UCX takes TCP here: shared memory would end each READ at once, and RDMA needs a card.
"""

import importlib.util
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from blockyard.proto.v1.session_pb2 import PullEnd
from blockyard.worker.transfer import nixl
from blockyard.worker.transfer.nixl import NixlAgent
from blockyard.worker.transfer.wire import Late

from tests.nightly.faults.test_transfers import Peer, until_unused
from tests.nightly.faults.transfer_rig import BLOCK_BYTES, KV_SHAPE, tapped
from tests.system.processes import Processes, free_port, processes
from tests.unit.worker.checkpoints import make_checkpoint
from tests.unit.worker.pulling import BLOCKS

has_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
OPTIONS = ("--device", "cpu", "--deterministic", "--kv-cache-memory", str(64 * BLOCK_BYTES))
LENDING = ("--host-cache-gib", str(64 * BLOCK_BYTES / 2**30), "--lend-share", "0.5")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("nixl")
    model = make_checkpoint(folder / "model", "LlamaForCausalLM", **KV_SHAPE)
    with pytest.MonkeyPatch.context() as patch, processes(folder) as cluster:
        patch.setenv("UCX_TLS", "tcp")
        for name in ("with0", "with1", "without"):
            way = () if name == "without" else ("--nixl",)
            port = ("--transfer-port", str(free_port()))
            cluster.add_worker(name, *OPTIONS, *LENDING, *port, *way, model=model)
        cluster.start(*cluster.workers.values())
        yield cluster


@has_nixl
@pytest.mark.parametrize(
    ("source", "destination"), [("with0", "with1"), ("with0", "without"), ("without", "with1")]
)
async def test_pulled_blocks_give_the_same_tokens_whichever_end_has_nixl(
    cluster: Processes, source: str, destination: str
) -> None:
    token = 5 + len(source) + 2 * len(destination)
    there, here = cluster.workers[source], cluster.workers[destination]
    async with Peer(there) as lender, Peer(here) as router:
        expected = await lender.ask(1, token=token)
        async with tapped(lender.hello.transfer_port, 1 << 40, _nothing) as tap:
            order = lender.order(address=tap.address)
            assert await router.ask(1, token=token, pull=order) == expected
        assert router.reports[1].end == PullEnd.PULL_END_WHOLE
        assert router.cached == {1: BLOCKS * 16}
        has_read = "without" not in (source, destination)
        assert (tap.passed < BLOCK_BYTES) is has_read, "NIXL has connections of its own"
        await until_unused(lender)


async def _nothing() -> None:
    """Do no harm."""


@has_nixl
async def test_a_source_that_freezes_costs_no_more_than_the_estimate_and_no_token(cluster: Processes) -> None:
    there, here = cluster.workers["with0"], cluster.workers["with1"]
    async with Peer(there) as lender, Peer(here) as router:
        expected = await lender.ask(1, token=60)

        async def freeze() -> None:
            there.signal(signal.SIGSTOP)

        # The places of the first blocks have passed.
        async with tapped(lender.hello.transfer_port, 2000, freeze) as tap:
            order = lender.order(address=tap.address, seconds=1.0)
            assert await router.ask(1, token=60, pull=order) == expected
        there.signal(signal.SIGCONT)
        assert router.reports[1].end == PullEnd.PULL_END_LATE
        await until_unused(lender)
        assert await router.ask(2, token=60) == expected


SOURCE = """
import sys, time
from blockyard.worker.transfer.nixl import NixlAgent, address_of
memory = memoryview(bytearray(b"\\7") * (1 << 24))
agent = NixlAgent("source", [(address_of(memory), len(memory))], 1024)
print(agent.access.hex(), address_of(memory), flush=True)
time.sleep(60)
"""


@has_nixl
def test_a_read_that_is_given_up_writes_to_no_slot_and_its_staging_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    size, deadline = 1 << 22, [math.inf]

    def check() -> None:
        if time.monotonic() > deadline[0]:
            raise Late

    with subprocess.Popen([sys.executable, "-c", SOURCE], stdout=subprocess.PIPE, text=True) as source:
        try:
            assert source.stdout is not None
            lines = (line.split() for line in source.stdout)
            access, start = next(found for found in lines if len(found) == 2 and found[1].isdigit())
            agent = NixlAgent("destination", [], size)
            memory = agent.memory_of(bytes.fromhex(access), check)
            place = [(int(start), size)]
            slot = memoryview(bytearray(size))
            memory.read(place, slot)
            assert slot == b"\7" * size
            slot[:] = bytes(size)
            source.send_signal(signal.SIGSTOP)
            deadline[0] = time.monotonic() + 0.5
            with pytest.raises(Late):
                memory.read(place, slot)
            ((_, given_up),) = agent._abandoned
            with monkeypatch.context() as patch:
                patch.setattr(nixl, "MAX_STAGED", 1)
                assert not agent.has_staging(), "blocks come over TCP meanwhile"
            assert agent.has_staging()
            deadline[0] = math.inf
            source.send_signal(signal.SIGCONT)
            others = [memoryview(bytearray(size)) for _ in range(3)]
            for other in others:
                memory.read(place, other)
                assert other == b"\7" * size
            assert slot == bytes(size), "nobody waits for it, so it belongs to somebody else"
            assert given_up == b"\7" * size, "NIXL has written late"
        finally:
            source.kill()
