"""Ways of a transfer: without TLS to a neighbour on the machine and to no other, and NIXL where its package is."""

import importlib.util
import socket
import ssl
from contextlib import AsyncExitStack

import pytest
from blockyard.proto.v1.session_pb2 import PullEnd
from blockyard.worker.scheduling import pulls
from blockyard.worker.transfer.neighbours import Neighbours
from blockyard.worker.transfer.nixl import NixlAgent

from .pulling import BLOCKS, Router, a_worker, bytes_of_blocks, pull_from
from .serving import SECRET


@pytest.mark.parametrize("secret", [SECRET, ""])
async def test_neighbours_take_no_tls_and_others_the_same_blocks_by_tcp(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "LATE_SECONDS", 20.0)
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
            has_tls = family == socket.AF_INET and bool(secret)
            assert isinstance(connection._socket, ssl.SSLSocket) is has_tls


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


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="nixl is installed")
def test_a_worker_without_the_package_of_nixl_says_how_to_install_it() -> None:
    with pytest.raises(ValueError, match=r"pip install 'blockyard\[nixl\]'"):
        NixlAgent("w0", [], 1024)
