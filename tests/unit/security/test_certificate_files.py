"""Expiry of certificates, and files that are replaced while a server runs."""

import asyncio
import logging
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Event

import grpc
import pytest
from blockyard.proto.security import certificate_files
from blockyard.proto.security.certificate_files import Reloaded, read_ca, read_pair
from blockyard.proto.security.tls import TlsWatch, https_context, listen, server_credentials, session_channels
from blockyard.proto.security.tls_files import ServerTls, SessionTls

from .certificates import DAY, Authority, Pair

SECONDS = 20.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
"""First bytes of a gRPC client."""


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_files, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(certificate_files, "MAX_WAIT_SECONDS", SECONDS)


@pytest.mark.parametrize(
    ("ends_in", "told"), [(-DAY, "has expired on 20"), (10 * DAY, "is not valid before 20")]
)
def test_a_certificate_of_another_time_is_refused_at_start(
    ca: Authority, ends_in: timedelta, told: str
) -> None:
    """Every port refuses such a certificate of its own, and so does a client."""
    pair = ca.pair("wrong", ends_in=ends_in)
    server = ServerTls(cert=pair.cert, key=pair.key)
    session = SessionTls(cert=pair.cert, key=pair.key, ca=ca.ca)
    for start in (
        lambda: read_pair(pair.key, pair.cert),
        lambda: server_credentials(server),
        lambda: server_credentials(session),
        lambda: session_channels(session, secret="", cluster="default"),
        lambda: https_context(server),
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


def test_a_watch_tells_of_files_that_cannot_be_used_until_they_are_mended(
    ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair, wrong = ca.pair("ours"), ca.pair("other")
    watch = TlsWatch(SessionTls(cert=pair.cert, key=pair.key, ca=ca.ca))
    cert, key, roots = Path(pair.cert), Path(pair.key), Path(ca.ca)
    content = {path: path.read_bytes() for path in (cert, key, roots)}

    def mended() -> None:
        for path, good in content.items():
            path.touch(mode=0o600)
            path.write_bytes(good)
            path.chmod(0o600)

    harms: tuple[Callable[[], object], ...] = (
        lambda: key.chmod(0o644),
        lambda: key.unlink(),
        lambda: cert.write_bytes(content[cert][:100]),
        lambda: cert.write_bytes(Path(wrong.cert).read_bytes()),
        lambda: roots.write_bytes(b""),
    )
    for harm in harms:
        assert watch.are_good()
        harm()
        caplog.clear()
        assert (watch.are_good(), watch.are_good()) == (False, False)
        assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
        mended()
    assert watch.are_good()
    short = ca.pair("short", ends_in=timedelta(seconds=2.0))
    watch = TlsWatch(ServerTls(cert=short.cert, key=short.key))
    while watch.are_good():  # The file stays as it is, and its end comes.
        time.sleep(0.05)


def test_a_file_server_that_hangs_keeps_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers are event loops, and gRPC's threads for handshakes."""
    monkeypatch.setattr(certificate_files, "MAX_WAIT_SECONDS", 0.05)
    path, answers = tmp_path / "file", Event()
    path.write_text("old")
    answers.set()

    def read() -> str:
        answers.wait(SECONDS)
        return path.read_text()

    files = Reloaded([str(path)], read)
    answers.clear()
    path.write_text("newer")
    assert [files.current() for _ in range(20)] == 20 * ["old"]
    assert "reading takes long" in caplog.text
    answers.set()
    deadline = time.monotonic() + SECONDS
    while files.current() != "newer":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def put(pair: Pair, at: Pair) -> None:
    """Copy the files of one pair over those of another."""
    for source, destination in ((pair.cert, at.cert), (pair.key, at.key)):
        if source != destination:
            shutil.copy(source, destination)


async def trusts(address: str, ca: str) -> bool:
    """Return whether a client that trusts only this CA reaches a gRPC port."""
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


@asynccontextmanager
async def https_port(tls: ServerTls) -> AsyncIterator[int]:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.readline()
            writer.write(b"hello")
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=https_context(tls))
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def grpc_port(tls: ServerTls) -> AsyncIterator[int]:
    server = grpc.aio.server()
    port = listen(server, "127.0.0.1:0", server_credentials(tls))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


Port = Callable[[ServerTls], AbstractAsyncContextManager[int]]


def client_context(ca: str, own: Pair, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(own.cert, own.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeted:
    """Result of a handshake, as a client of either port sees it."""

    is_in: bool
    is_resumed: bool = False
    session: ssl.SSLSession | None = None


def greeted(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> Greeted:
    """Greet a port. This function blocks, because asyncio resumes no session."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(PREFACE)
            # A client hears only here that its own certificate is refused.
            return Greeted(
                is_in=connection.recv(100) != b"",
                is_resumed=bool(connection.session_reused),
                session=connection.session,
            )
    except (ssl.SSLError, ConnectionError):
        return Greeted(is_in=False)


async def comes_in(port: int, ca: str, own: Pair) -> bool:
    """Return whether this client trusts the HTTP port, and the port trusts the client."""
    return (await asyncio.to_thread(greeted, port, client_context(ca, own))).is_in


async def test_an_https_port_takes_a_replaced_certificate_and_client_ca(
    tmp_path: Path, ca: Authority
) -> None:
    shown, other = ca.pair("shown"), Authority(tmp_path, "other")
    clients = shutil.copy(ca.ca, tmp_path / "clients.pem")
    ours, theirs = ca.pair("ours"), other.pair("theirs")
    async with https_port(ServerTls(cert=shown.cert, key=shown.key, client_ca=str(clients))) as port:
        assert await comes_in(port, ca.ca, ours)
        assert not await comes_in(port, ca.ca, theirs)
        put(other.pair("new"), shown)
        shutil.copy(other.ca, clients)
        assert await comes_in(port, other.ca, theirs)
        assert not await comes_in(port, other.ca, ours)
        assert not await comes_in(port, ca.ca, theirs)
        await asyncio.to_thread(Path(clients).unlink)
        assert await comes_in(port, other.ca, theirs), "what was read before stays"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("serve", [https_port, grpc_port])
@pytest.mark.parametrize("has_tickets", [True, False], ids=["tickets", "session ids"])
async def test_no_session_outlives_the_client_ca_that_it_was_verified_by(
    tmp_path: Path, ca: Authority, version: ssl.TLSVersion, has_tickets: bool, serve: Port
) -> None:
    """A client that resumes its session shows no certificate again. The HTTP port resumes no session."""
    shown, other = ca.pair("shown"), Authority(tmp_path, "other")
    clients = shutil.copy(ca.ca, tmp_path / "clients.pem")
    context = client_context(ca.ca, ca.pair("ours"), version)
    if not has_tickets:
        context.options |= ssl.OP_NO_TICKET
    async with serve(ServerTls(cert=shown.cert, key=shown.key, client_ca=str(clients))) as port:
        first = await asyncio.to_thread(greeted, port, context)
        again = await asyncio.to_thread(greeted, port, context, first.session)
        assert (first.is_in, again.is_in) == (True, True)
        assert not again.is_resumed or serve is grpc_port
        shutil.copy(other.ca, clients)
        assert not (await asyncio.to_thread(greeted, port, context, first.session)).is_in
        assert not (await asyncio.to_thread(greeted, port, context)).is_in
