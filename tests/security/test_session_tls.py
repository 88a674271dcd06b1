"""Routers and workers with TLS between them: real processes, and who is kept out."""

from pathlib import Path

import grpc
import pytest
from blockyard.proto.tls import SESSION_NAME, read_ca, session_channel, session_credentials
from blockyard.proto.tls_files import SessionTls
from blockyard.proto.v1 import cluster_pb2
from blockyard.proto.v1.session_pb2_grpc import EngineServiceStub
from blockyard.router.client import AsyncClient

from .certificates import Authority
from .rig import CLUSTER_SECRET, SIMULATED, processes, until, until_ready

pytestmark = [pytest.mark.cluster]


def session(authority: Authority, name: str = "session", **facts: bool) -> SessionTls:
    pair = authority.pair(name, dns=SESSION_NAME, **facts)
    return SessionTls(cert=pair.cert, key=pair.key, ca=authority.ca)


def options(tls: SessionTls) -> tuple[str, ...]:
    return ("--session-tls-cert", tls.cert, "--session-tls-key", tls.key, "--session-tls-ca", tls.ca)


async def answer(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    """Of a worker, to somebody who knows the cluster's secret."""
    async with session_channel(credentials, (), address) as channel:
        try:
            await EngineServiceStub(channel).GetBlockPool(
                cluster_pb2.GetBlockPoolRequest(),
                metadata=(("x-blockyard-secret", CLUSTER_SECRET),),
                timeout=10,
            )
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


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
                    return "UNAVAILABLE" in known.state_reason

                await until(was_refused, seconds=30)
                assert (await client.cluster_info()).workers_ready == 0
        assert await answer(worker.address, session_credentials(tls)) is grpc.StatusCode.OK
        for outsider in (None, session_credentials(session(ours, "expired", has_expired=True))):
            assert await answer(worker.address, outsider) is grpc.StatusCode.UNAVAILABLE
        nothing_shown = grpc.ssl_channel_credentials(read_ca(ours.ca))
        assert await answer(worker.address, nothing_shown) is grpc.StatusCode.UNAVAILABLE


def test_the_three_files_go_together(tmp_path: Path) -> None:
    with processes(tmp_path) as cluster:
        worker = cluster.add_worker("worker-0", *SIMULATED, "--session-tls-cert", "cert.pem")
        worker.spawn()
        assert worker.wait(60) == 1
        assert "--session-tls-cert, --session-tls-key and --session-tls-ca go together" in worker.log_text()
