"""TLS as clients and routers see it: both clients, good and bad certificates, on real ports."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from blockyard.proto.security import certificate_files
from blockyard.proto.security.tls_files import ServerTls
from blockyard.proto.v1 import cluster_pb2
from blockyard.proto.v1.cluster_pb2_grpc import ClusterServiceStub
from blockyard.router.client import AsyncClient, AuthenticationError, Client, TlsOptions, UnavailableError
from blockyard.router.client.connection import TOKEN_VARIABLE
from blockyard.router.server import RouterServer

from tests.unit.router.rig import config

from .certificates import DAY, Authority, unchecked
from .conftest import Tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def serving(tls: ServerTls | None, **settings: Any) -> AsyncIterator[str]:
    """A router's address; it has no workers and needs none here."""
    router = RouterServer(config(tls=tls, **settings))
    yield await router.start()
    await router.stop(0.0)


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tls_router(ca: Authority) -> AsyncIterator[str]:
    server = ca.pair("server")
    async with serving(ServerTls(cert=server.cert, key=server.key)) as address:
        yield address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mtls_router(ca: Authority, tokens: Tokens) -> AsyncIterator[str]:
    server = ca.pair("mtls-server")
    tls = ServerTls(cert=server.cert, key=server.key, client_ca=ca.ca)
    async with serving(tls, auth_file=str(tokens.path)) as address:
        yield address


async def ask(address: str, *, seconds: float = 10.0, **options: Any) -> None:
    """Ask with both clients. Raises what they raise, which must be the same."""
    options = {"timeout_seconds": seconds, "retries": 0, **options}

    def ask_blocking() -> None:
        with Client(address, **options) as client:
            client.list_workers()

    async def ask_async() -> None:
        async with AsyncClient(address, **options) as client:
            await client.list_workers()

    answers = await asyncio.gather(ask_async(), asyncio.to_thread(ask_blocking), return_exceptions=True)
    one, other = answers
    assert (type(one), str(one)) == (type(other), str(other))
    if one is not None:
        raise one


async def unavailable(address: str, **options: Any) -> str:
    with pytest.raises(UnavailableError) as caught:
        await ask(address, **options)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    return str(caught.value)


async def test_a_client_that_trusts_the_ca_is_served(tls_router: str, ca: Authority) -> None:
    await ask(tls_router, tls=TlsOptions(ca=ca.ca))


async def test_a_client_that_trusts_another_ca_is_told_so(tls_router: str, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    for tls in (TlsOptions(ca=other.ca), TlsOptions()):
        told = await unavailable(tls_router, tls=tls)
        assert (
            told == f"the TLS certificate of the router at {tls_router} is of no CA that this client trusts"
        )


async def test_plaintext_to_a_port_with_tls_is_told_as_such(tls_router: str) -> None:
    assert await unavailable(tls_router) == (
        f"no router answers at {tls_router}: the connection was closed, as by one that wants TLS"
    )


async def test_tls_to_a_port_without_is_told_as_such(ca: Authority) -> None:
    async with serving(None) as address:
        told = await unavailable(address, tls=TlsOptions(ca=ca.ca))
        assert told == f"what answers at {address} does not speak TLS"


class DaysAgo(datetime):
    """A clock by which no certificate has expired yet."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.now(tz) - 2 * DAY


async def test_a_routers_expired_certificate_is_told_as_such(
    ca: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ca.pair("expired-server", has_expired=True)
    monkeypatch.setattr(certificate_files, "datetime", DaysAgo)
    async with serving(ServerTls(cert=server.cert, key=server.key)) as address:
        told = await unavailable(address, tls=TlsOptions(ca=ca.ca))
        assert told == f"the TLS certificate of the router at {address} has expired"


async def test_a_certificate_for_another_host_is_told_as_such(ca: Authority) -> None:
    server = ca.pair("elsewhere", dns="elsewhere", address="127.0.0.9")
    async with serving(ServerTls(cert=server.cert, key=server.key)) as address:
        told = await unavailable(address, tls=TlsOptions(ca=ca.ca))
        assert told == f"the TLS certificate of the router at {address} is for another host"


async def test_with_a_client_ca_only_its_clients_are_served_and_tokens_count_besides(
    mtls_router: str, ca: Authority, tokens: Tokens, tmp_path: Path
) -> None:
    good, expired = ca.pair("client"), ca.pair("expired-client", has_expired=True)
    foreign = Authority(tmp_path, "foreign").pair("foreign-client")
    vic = tokens.of["vic"]
    await ask(mtls_router, token=vic, tls=TlsOptions(ca=ca.ca, cert=good.cert, key=good.key))
    closed = f"no router answers at {mtls_router}: the connection was closed"
    refused = f"{closed}, as by one that wants a client certificate, or another one"
    told = await unavailable(
        mtls_router, token=vic, tls=TlsOptions(ca=ca.ca, cert=foreign.cert, key=foreign.key)
    )
    assert told == refused
    with pytest.raises(ValueError, match=r"expired-client\.pem has expired on"):
        Client(mtls_router, token=vic, tls=TlsOptions(ca=ca.ca, cert=expired.cert, key=expired.key))
    async with grpc.aio.secure_channel(mtls_router, unchecked(ca.ca, expired)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ClusterServiceStub(channel).ListWorkers(cluster_pb2.ListWorkersRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await unavailable(mtls_router, token=vic, tls=TlsOptions(ca=ca.ca))) == refused
    with pytest.raises(AuthenticationError, match="one bearer token is required"):
        await ask(mtls_router, tls=TlsOptions(ca=ca.ca, cert=good.cert, key=good.key))


async def test_bad_handshakes_leave_the_router_serving(
    mtls_router: str, ca: Authority, tokens: Tokens
) -> None:
    good = ca.pair("another-client")
    for _ in range(20):
        host, _, port = mtls_router.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await writer.drain()
        writer.close()
    await ask(mtls_router, token=tokens.of["vic"], tls=TlsOptions(ca=ca.ca, cert=good.cert, key=good.key))


async def test_files_that_cannot_be_used_are_named_before_anything_starts(
    ca: Authority, tmp_path: Path
) -> None:
    pair, other = ca.pair("one"), ca.pair("two")
    shown = tmp_path / "shown.key"
    shutil.copy(pair.key, shown)
    shown.chmod(0o644)
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("hello")
    for tls, told in (
        (ServerTls(cert=pair.cert, key=other.key), "are no pair in PEM form"),
        (ServerTls(cert=str(no_pem), key=pair.key), "are no pair in PEM form"),
        (ServerTls(cert=pair.cert, key=str(shown)), r"TLS key .*shown\.key may be read by everybody .*0644"),
        (ServerTls(cert=str(tmp_path / "none"), key=pair.key), r"TLS certificate .*none cannot be read"),
        (ServerTls(cert=pair.cert, key=pair.key, client_ca=str(no_pem)), "holds no certificates in PEM form"),
    ):
        with pytest.raises(ValueError, match=told):
            async with serving(tls):
                pass
    with pytest.raises(ValueError, match="certificate and its key go together"):
        Client("localhost:1", tls=TlsOptions(cert=pair.cert))


REMOTE = ("router.example:50051", "10.0.0.7:50051", "dns:///router.example:50051", "[2001:db8::1]:50051")
LOCAL = ("localhost:50051", "127.0.0.1:50051", "[::1]:50051", "dns:///localhost:1", "ipv4:127.0.0.9:1")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_token_goes_over_plaintext_to_this_machine_only_unless_asked_for(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in REMOTE:
        with pytest.raises(ValueError, match="in plaintext") as caught:
            kind([*LOCAL, address], token="hunter2")
        assert "hunter2" not in str(caught.value)
        kind(address, token="hunter2", tls=TlsOptions())
        kind(address, token="hunter2", allow_plaintext_token=True)
        kind(address)
    for address in LOCAL:
        kind(address, token="hunter2")
    monkeypatch.setenv(TOKEN_VARIABLE, "hunter2")
    with pytest.raises(ValueError, match="in plaintext"):
        kind(REMOTE[0])
    kind(REMOTE[0], token="")


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "snow\u2603man", "x" * 4097])
async def test_what_is_no_token_is_refused_without_repeating_it(token: str) -> None:
    with pytest.raises(ValueError, match="visible ASCII") as caught:
        Client("localhost:1", token=token)
    assert token not in str(caught.value)


async def test_the_environments_token_is_shown(mtls_router: str, ca: Authority, tokens: Tokens) -> None:
    good = ca.pair("third-client")
    tls = TlsOptions(ca=ca.ca, cert=good.cert, key=good.key)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(TOKEN_VARIABLE, tokens.of["vic"])
        await ask(mtls_router, tls=tls)
        with pytest.raises(AuthenticationError):
            await ask(mtls_router, tls=tls, token="another")
