"""Routers and workers prove by TLS that they belong together: real processes, and which peers are rejected."""

import asyncio
from pathlib import Path

import grpc
import pytest
from blockyard.proto.security.certificate_files import read_ca
from blockyard.proto.security.peer_sockets import SESSION_NAME
from blockyard.proto.security.tls import session_channels
from blockyard.proto.security.tls_files import SessionTls
from blockyard.proto.v1 import cluster_pb2
from blockyard.proto.v1.session_pb2_grpc import EngineServiceStub
from blockyard.router.client import AsyncClient

from tests.system.load import until_ready
from tests.system.processes import SECRET, SIMULATED, processes
from tests.unit.router.rig import until
from tests.unit.security.certificates import Authority, unchecked


def session(authority: Authority, name: str = "session", **facts: bool) -> SessionTls:
    pair = authority.pair(name, dns=SESSION_NAME, **facts)
    return SessionTls(cert=pair.cert, key=pair.key, ca=authority.ca)


def options(tls: SessionTls) -> tuple[str, ...]:
    return ("--session-tls-cert", tls.cert, "--session-tls-key", tls.key, "--session-tls-ca", tls.ca)


async def answer(address: str, tls: SessionTls | None = None, secret: str = "") -> grpc.StatusCode:
    """Return a worker's answer to a peer with these files, or with this secret, or in plaintext."""
    async with session_channels(tls, secret=secret, cluster="default")(address) as channel:
        return await _answer(channel)


async def _answer(channel: grpc.aio.Channel) -> grpc.StatusCode:
    try:
        await EngineServiceStub(channel).GetBlockPool(cluster_pb2.GetBlockPoolRequest(), timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_cluster_proves_its_secret_by_tls_that_nobody_has_to_set_up(tmp_path: Path) -> None:
    with processes(tmp_path) as cluster:
        worker = cluster.add_worker("worker-0", *SIMULATED)
        good = cluster.add_router("good", workers=(worker.address,))
        other = cluster.add_router("other", workers=(worker.address,))
        other.environment["BLOCKYARD_CLUSTER_SECRET"] = "the-secret-of-another-cluster"
        cluster.start(worker, good, other)
        async with AsyncClient(good.address) as client:
            await until_ready(client, "worker-0", seconds=60.0)
            assert (await client.generate("x", max_tokens=4)).finish.completion_tokens == 4
        async with AsyncClient(other.address) as client:

            async def was_refused() -> bool:
                (known,) = await client.list_workers()
                return "the cluster secret" in known.state_reason

            await until(was_refused, seconds=30)
        assert await answer(worker.address, secret=SECRET) is grpc.StatusCode.OK
        for secret in ("", "guess"):
            assert await answer(worker.address, secret=secret) is grpc.StatusCode.UNAVAILABLE


async def test_a_false_worker_learns_nothing_but_that_somebody_called() -> None:
    """The intruder may have a former worker's address, which the router still knows."""
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            heard.extend(data)

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with session_channels(None, secret=SECRET, cluster="default")(f"{host}:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await EngineServiceStub(channel).GetBlockPool(
                    cluster_pb2.GetBlockPoolRequest(worker_id="a-prompt"), timeout=2
                )
    tls_handshake = 0x16
    assert heard[0] == tls_handshake
    assert not any(word in heard for word in (SECRET.encode(), b"a-prompt", b"EngineService"))


async def test_a_cluster_serves_over_tls_and_only_its_own_certificates_reach_a_worker(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    theirs = Authority(tmp_path, "theirs")
    tls = session(ours)
    with processes(tmp_path) as cluster:
        worker = cluster.add_worker("worker-0", *SIMULATED, *options(tls))
        good = cluster.add_router("good", *options(tls), workers=(worker.address,))
        plain = cluster.add_router("plain", workers=(worker.address,))
        foreign = cluster.add_router(
            "foreign", *options(session(theirs, "foreign")), workers=(worker.address,)
        )
        cluster.start(worker, good, plain, foreign)
        async with AsyncClient(good.address) as client:
            await until_ready(client, "worker-0", seconds=60.0)
            assert (await client.generate("x", max_tokens=4)).finish.completion_tokens == 4
        for router in (plain, foreign):
            async with AsyncClient(router.address) as client:

                async def was_refused(client: AsyncClient = client) -> bool:
                    (known,) = await client.list_workers()
                    return "the TLS handshake failed" in known.state_reason

                await until(was_refused, seconds=30)
                assert (await client.cluster_info()).workers_ready == 0
        assert await answer(worker.address, tls) is grpc.StatusCode.OK
        assert await answer(worker.address) is grpc.StatusCode.UNAVAILABLE
        assert await answer(worker.address, secret=SECRET) is grpc.StatusCode.UNAVAILABLE
        expired = session(ours, "expired", has_expired=True)
        with pytest.raises(ValueError, match=r"expired\.pem has expired on"):
            session_channels(expired, secret="", cluster="default")
        nothing_shown = grpc.ssl_channel_credentials(read_ca(ours.ca))
        named = (("grpc.ssl_target_name_override", SESSION_NAME),)
        for credentials in (nothing_shown, unchecked(ours.ca, expired)):
            async with grpc.aio.secure_channel(worker.address, credentials, options=named) as channel:
                assert await _answer(channel) is grpc.StatusCode.UNAVAILABLE


def test_the_three_files_go_together(tmp_path: Path) -> None:
    with processes(tmp_path) as cluster:
        worker = cluster.add_worker("worker-0", *SIMULATED, "--session-tls-cert", "cert.pem")
        worker.spawn()
        assert worker.wait(60) == 1
        assert "--session-tls-cert, --session-tls-key and --session-tls-ca go together" in worker.log_text()
