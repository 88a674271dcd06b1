"""Transfers between workers of one machine: without TLS for a neighbour, and for no other."""

import asyncio
import socket
import ssl
import sys
from contextlib import AsyncExitStack

import pytest
from blockyard.proto.v1.session_pb2 import PullEnd
from blockyard.worker.transfer.neighbours import Neighbours

from .test_session import SECRET
from .test_transfer import BLOCKS, Router, a_worker, bytes_of_blocks, pull_from
from .test_transfer import patient as patient


@pytest.mark.parametrize("secret", [SECRET, ""])
async def test_neighbours_take_no_tls_and_others_the_same_blocks_by_tcp(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(a_worker("w0", secret=secret))
        near = await stack.enter_async_context(a_worker("w1", secret=secret))
        with monkeypatch.context() as patch:
            patch.setattr("blockyard.worker.server.Neighbours", lambda *arguments: None)
            far = await stack.enter_async_context(a_worker("w2", secret=secret))
        there = await stack.enter_async_context(Router(source, secret))
        expected = await there.ask(1)
        blocks = await bytes_of_blocks(source)
        for worker, family in ((near, socket.AF_UNIX), (far, socket.AF_INET)):
            async with Router(worker, secret) as router:
                assert await router.ask(1, pull=await pull_from(source, secret)) == expected
                assert router.reports[1].end == PullEnd.PULL_END_WHOLE
            assert await bytes_of_blocks(worker) == blocks[:BLOCKS]
            (connection,) = worker._exchange._receiver._idle.values()
            assert connection._socket.family == family
            assert isinstance(connection._socket, ssl.SSLSocket) is (
                family == socket.AF_INET and bool(secret)
            )


async def test_a_process_that_the_worker_may_not_inspect_is_no_neighbour() -> None:
    """Root may inspect what hides, but the process then has another account."""
    async with a_worker("w0") as worker:
        _, near = worker._exchange._lender._listeners
        name = near.getsockname().hex()
        stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, name)
        assert await asyncio.wait_for(stranger.wait(), 20) == 0, "it was not turned away"


STRANGER = """
import ctypes, os, socket, sys
if os.getuid():
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
else:
    os.setgid(65534)
    os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(bytes.fromhex(sys.argv[1]))
    assert not sock.recv(1)
"""


def test_a_neighbour_is_found_by_secret_cluster_incarnation_and_port() -> None:
    neighbours = Neighbours("secret", "default")
    with neighbours.listen("incarnation", 1):
        found = neighbours.connect("incarnation", 1, 5.0)
        assert found is not None
        found.close()
        for other, incarnation, port in (
            (Neighbours("another", "default"), "incarnation", 1),
            (Neighbours("secret", "another"), "incarnation", 1),
            (neighbours, "another", 1),
            (neighbours, "incarnation", 2),
        ):
            assert other.connect(incarnation, port, 5.0) is None
    assert neighbours.connect("incarnation", 1, 5.0) is None, "it has ended"
