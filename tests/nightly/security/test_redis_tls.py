"""The index over `rediss://`: a real Redis behind a TLS port of ours, because the installed redis-server may lack
TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.index.contract import ErrorKind, PrefixIndexError
from blockyard.proto.index.redis import RedisPrefixIndex, connect

from tests.unit.security.certificates import Authority, Pair


@asynccontextmanager
async def tls_port(port: int, shown: Pair, client_ca: str) -> AsyncIterator[int]:
    """Forward to `port` each client that shows a certificate of this CA."""
    settings = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    settings.verify_mode = ssl.CERT_REQUIRED
    settings.load_cert_chain(shown.cert, shown.key)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while taken := await reader.read(65536):
            writer.write(taken)
        writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer), return_exceptions=True)

    async with await asyncio.start_server(join, "127.0.0.1", 0, ssl=settings) as server:
        yield server.sockets[0].getsockname()[1]


async def look_up(url: str) -> None:
    client = connect(url, timeout_seconds=5.0)
    try:
        assert await RedisPrefixIndex(client, "default").lookup([bytes(16)]) == []
    finally:
        await client.aclose()


async def test_the_index_is_reached_over_tls_by_certificates_of_the_right_ca_alone(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    client, stranger = ours.pair("client"), theirs.pair("stranger")
    redis = start_private_redis(tmp_path / "redis", password="hush")
    try:
        async with tls_port(redis.port, ours.pair("server"), ours.ca) as port:

            def url(ca: str, pair: Pair) -> str:
                files = f"ssl_ca_certs={ca}&ssl_certfile={pair.cert}&ssl_keyfile={pair.key}"
                return f"rediss://:hush@127.0.0.1:{port}/0?{files}"

            await look_up(url(ours.ca, client))
            for refused in (
                url(theirs.ca, client),
                url(ours.ca, stranger),
                f"rediss://:hush@127.0.0.1:{port}/0",
                f"redis://:hush@127.0.0.1:{port}/0",
            ):
                with pytest.raises(PrefixIndexError) as caught:
                    await look_up(refused)
                assert caught.value.kind in (ErrorKind.CONNECTION, ErrorKind.TIMEOUT)
                assert "hush" not in str(caught.value)
    finally:
        redis.stop()
