"""Certificates by their dates, and files that are replaced while a server runs."""

import asyncio
import logging
import shutil
import ssl
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from blockyard.proto import certificate_files
from blockyard.proto.certificate_files import read_ca, read_pair
from blockyard.proto.tls import https_context, listen, server_credentials, session_channels
from blockyard.proto.tls_files import ServerTls, SessionTls

from .certificates import DAY, Authority, Pair

SECONDS = 20.0


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_files, "LOOK_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("ends_in", "told"), [(-DAY, "has expired on 20"), (10 * DAY, "is not valid before 20")]
)
def test_a_certificate_of_another_time_is_refused_at_start(
    ca: Authority, ends_in: timedelta, told: str
) -> None:
    """On every port, and of a client."""
    pair = ca.pair("wrong", ends_in=ends_in)
    for start in (
        lambda: read_pair(pair.key, pair.cert),
        lambda: server_credentials(ServerTls(cert=pair.cert, key=pair.key)),
        lambda: server_credentials(SessionTls(cert=pair.cert, key=pair.key, ca=ca.ca)),
        lambda: session_channels(
            SessionTls(cert=pair.cert, key=pair.key, ca=ca.ca), secret="", cluster="default"
        ),
        lambda: https_context(ServerTls(cert=pair.cert, key=pair.key)),
    ):
        with pytest.raises(ValueError, match=rf"wrong\.pem {told}"):
            start()


def test_an_expired_ca_is_refused_unless_another_lies_beside_it(tmp_path: Path, ca: Authority) -> None:
    expired = Authority(tmp_path, "expired-ca", ends_in=-DAY)
    with pytest.raises(ValueError, match=r"expired-ca\.pem has expired on"):
        read_ca(expired.ca)
    both = tmp_path / "both.pem"
    both.write_bytes(Path(expired.ca).read_bytes() + Path(ca.ca).read_bytes())
    assert read_ca(str(both)) == both.read_bytes()


def test_the_log_warns_of_a_certificate_that_expires_within_two_weeks(
    ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    late, soon = ca.pair("late", ends_in=20 * DAY, lasts=30 * DAY), ca.pair("soon", ends_in=2 * DAY)
    with caplog.at_level(logging.WARNING):
        read_pair(late.key, late.cert)
        assert not caplog.records
        read_pair(soon.key, soon.cert)
    (record,) = caplog.records
    assert "soon.pem expires on 20" in record.getMessage()


def put(pair: Pair, at: Pair) -> None:
    """The files of one in the place of the other's."""
    for source, destination in ((pair.cert, at.cert), (pair.key, at.key)):
        if source != destination:
            shutil.copy(source, destination)


async def trusts(address: str, ca: str) -> bool:
    """Whether a client that trusts this CA alone comes to a port of gRPC."""
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(read_ca(ca))) as channel:
        try:
            await channel.unary_unary("/nobody/knows")(b"", timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
    return False


async def test_a_replaced_certificate_is_shown_to_the_next_connection_and_a_broken_one_is_not(
    tmp_path: Path, ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    shown, other = ca.pair("shown"), Authority(tmp_path, "other")
    server = grpc.aio.server()
    port = listen(server, "127.0.0.1:0", server_credentials(ServerTls(cert=shown.cert, key=shown.key)))
    await server.start()
    address = f"localhost:{port}"
    try:
        assert (await trusts(address, ca.ca), await trusts(address, other.ca)) == (True, False)
        put(other.pair("new"), shown)
        assert (await trusts(address, ca.ca), await trusts(address, other.ca)) == (False, True)
        put(Pair(cert=shown.key, key=shown.key), shown)  # its key in the place of the certificate
        assert await trusts(address, other.ca), "what was read before stays"
        assert "what was read before stays in use" in caplog.text
        put(ca.pair("newest"), shown)
        assert await trusts(address, ca.ca)
    finally:
        await server.stop(0)


async def comes_in(port: int, ca: str, own: Pair) -> bool:
    """Whether this client trusts the HTTP port, and the port trusts it."""
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(own.cert, own.key)
    try:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname="localhost"
            )
            answer = await reader.read()  # a client hears only here that its own certificate is refused
            writer.close()
    except (ssl.SSLError, ConnectionError):
        return False
    return answer == b"hello"


async def test_an_https_port_takes_a_replaced_certificate_and_client_ca(
    tmp_path: Path, ca: Authority
) -> None:
    shown, other = ca.pair("shown"), Authority(tmp_path, "other")
    clients = shutil.copy(ca.ca, tmp_path / "clients.pem")
    ours, theirs = ca.pair("ours"), other.pair("theirs")

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    tls = ServerTls(cert=shown.cert, key=shown.key, client_ca=str(clients))
    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=https_context(tls))
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await comes_in(port, ca.ca, ours)
        assert not await comes_in(port, ca.ca, theirs)
        put(other.pair("new"), shown)
        shutil.copy(other.ca, clients)
        assert await comes_in(port, other.ca, theirs)
        assert not await comes_in(port, other.ca, ours)
        assert not await comes_in(port, ca.ca, theirs)
