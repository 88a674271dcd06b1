"""A server in Redis's place: whatever it answers, clients of the index stay sound, and fill no memory."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from blockyard.deploy.settings import redis_given
from blockyard.proto.index.contract import (
    Batch,
    Berth,
    Incarnation,
    PrefixIndexError,
    SpotCheck,
    WorkerId,
)
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.index.redis_parser import BoundedParser
from blockyard.proto.index.schema import pack_berths
from blockyard.proto.security.cluster_identity import is_genuine
from blockyard.router.dispatch.prefix_lookup import PrefixLookup, PrefixLookupConfig
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.pauses import free_loop
from tests.properties import examples
from tests.unit.router.fake_worker import SECRET

from .attacked_index import CLUSTER, MOST_LINES, NAMES, record

Reply = bytes
NUMBERS_AND_NOTHING = [
    *(b"$-1\r\n", b"*-1\r\n", b"_\r\n", b"#t\r\n", b",nan\r\n", b",inf\r\n", b"(" + b"9" * 30 + b"\r\n")
]
WORDS = [
    *(b"+OK\r\n", b"+DUPLICATE\r\n", b"$2\r\nOK\r\n", b"-NOSCRIPT none\r\n", b"-OOM full\r\n"),
    b"-ERR %s\r\n" % (b"x" * 5000),
]
NO_REPLIES = [b"*1\r\n" * 3000 + b":1\r\n", b":x\r\n", b"?\r\n", b"HTTP/1.1 400 Bad Request\r\n"]
atoms = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(lambda number: b":%d\r\n" % number),
    st.binary(max_size=30).map(lambda text: b"$%d\r\n%s\r\n" % (len(text), text)),
    st.sampled_from([*NUMBERS_AND_NOTHING, *WORDS, *NO_REPLIES, b"%1\r\n:1\r\n:2\r\n", b"~1\r\n:1\r\n"]),
)
replies = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=7).map(lambda items: b"*%d\r\n%s" % (len(items), b"".join(items))),
    max_leaves=20,
)
HELLO = b"%3\r\n+server\r\n+redis\r\n+version\r\n+7.2.0\r\n+proto\r\n:3\r\n"


@asynccontextmanager
async def server_that_answers(reply: Reply, *, more: Reply = b"", times: int = 0) -> AsyncIterator[str]:
    """Answer every command except those of a connection's beginning, with `more` after it that many times. Yield the
    URL."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            while header := await reader.readline():
                words = []
                for _ in range(int(header[1:])):
                    length = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(length + 2))[:-2])
                starts = {b"HELLO": HELLO, b"CLIENT": b"+OK\r\n"}
                start = starts.get(words[0].upper())
                writer.write(reply if start is None else start)
                await writer.drain()
                for _ in range(0 if start is not None else times):
                    writer.write(more)
                    await writer.drain()
        writer.close()

    async with await asyncio.start_server(converse, "127.0.0.1", 0) as listening:
        yield f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}/0"


@given(reply=replies)
@examples(40, deadline=None, suppress_health_check=list(HealthCheck))
async def test_whatever_a_replaced_server_answers_is_an_answer_of_ours_or_a_failure_of_the_index(
    reply: Reply,
) -> None:
    berth = Berth(number=1, epoch=1, anywhere=2)
    known = record("a", "127.0.0.1:1")
    async with server_that_answers(reply) as url, connect(url, timeout_seconds=0.1) as client:
        index = RedisPrefixIndex(client, CLUSTER)
        for call in (
            lambda: index.register(known, lease_seconds=1.0),
            lambda: index.apply(berth, Batch(sequence=1, added=NAMES)),
            lambda: index.renew(berth, lease_seconds=1.0, check=SpotCheck(record=known)),
            lambda: index.retire(berth),
            lambda: index.purge(),
            lambda: index.info(),
        ):
            with contextlib.suppress(PrefixIndexError):
                await call()
        with contextlib.suppress(PrefixIndexError):
            for holder in await index.lookup(NAMES):
                assert 0 <= holder.depth <= len(NAMES)
                assert 0 <= holder.depth + holder.host_blocks <= len(NAMES)
        failure = ""
        try:
            for listed in await index.directory():
                assert not is_genuine(listed, secret=SECRET, cluster=CLUSTER)
        except PrefixIndexError as error:
            failure = str(error)
        assert len(failure) < 400
        assert failure.isprintable()


CHUNK_BYTES = 1 << 20
FLOOD_CHUNKS = 256
MAX_TRACED_BYTES = 16 << 20
"""Bound on traced memory while 256 MiB are flooded. The test's own server holds some of it too."""
FLOODS = {
    "one string": (b"$2000000000\r\n", b"x" * CHUNK_BYTES),
    "one verbatim string": (b"=2000000000\r\n", b"x" * CHUNK_BYTES),
    "one error": (b"!2000000000\r\n", b"x" * CHUNK_BYTES),
    "strings of some size": (b"*2000000000\r\n", b"$65536\r\n%s\r\n" % (b"x" * 65_536) * 16),
    "lines of some size": (b"*2000000000\r\n", b"+%s\r\n" % (b"x" * 30_000) * 30),
    "arrays in arrays": (b"*2000000000\r\n", b"*1\r\n$65536\r\n%s\r\n" % (b"x" * 65_536) * 16),
    "a map": (b"%2000000000\r\n", b":1\r\n$65536\r\n%s\r\n" % (b"x" * 65_536) * 16),
    "notices that nobody asked for": (b"", b">2\r\n+message\r\n$65536\r\n%s\r\n" % (b"x" * 65_536) * 16),
    "numbers": (b"*2000000000\r\n", b":1\r\n" * (CHUNK_BYTES // 4)),
}


@contextmanager
def memory_is_bounded() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MAX_TRACED_BYTES


@pytest.mark.parametrize("query", ["", "?protocol=2"])
@pytest.mark.parametrize("flood", FLOODS)
async def test_a_replaced_server_fills_no_memory(flood: str, query: str) -> None:
    head, more = FLOODS[flood]
    async with (
        server_that_answers(head, more=more, times=FLOOD_CHUNKS) as url,
        connect(url + query, timeout_seconds=1.0) as client,
    ):
        with memory_is_bounded(), pytest.raises(PrefixIndexError):
            await RedisPrefixIndex(client, CLUSTER, is_reader=True).directory()


async def test_a_replaced_server_fills_no_memory_of_an_operators_command() -> None:
    head, more = FLOODS["one string"]
    async with server_that_answers(head, more=more, times=FLOOD_CHUNKS) as url:
        with memory_is_bounded():
            assert (await asyncio.to_thread(redis_given.look, url)).problem


@pytest.mark.parametrize(
    "url", ["redis://host", "rediss://host", "unix:///socket", "redis://host?protocol=2"]
)
def test_replies_are_read_by_our_parser_whichever_redis_py_would_take(url: str) -> None:
    pool: Any = connect(url, timeout_seconds=1.0).connection_pool
    assert type(pool.make_connection()._parser) is BoundedParser


async def test_a_replaced_server_sends_no_client_to_another_host() -> None:
    """redis-py follows a maintenance notice that a server has moved, and logs in there."""
    touched: list[bytes] = []

    async def trap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        touched.append(await reader.read(100))
        writer.close()

    moved = b">4\r\n$6\r\nMOVING\r\n:1\r\n:10\r\n$14\r\n127.0.0.2:6379\r\n"
    async with server_that_answers(moved + b"*0\r\n") as url:
        port = urlsplit(url).port
        async with await asyncio.start_server(trap, "127.0.0.2", port):
            with_login = url.replace("redis://", "redis://router:password@")
            async with connect(with_login, timeout_seconds=1.0) as client:
                index = RedisPrefixIndex(client, CLUSTER, is_reader=True)
                for _ in range(3):
                    with contextlib.suppress(PrefixIndexError):
                        await index.directory()
    assert not touched


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "item", [b":1\r\n", b"$5\r\nhello\r\n", b"*2\r\n:1\r\n:1\r\n", b"(" + b"9" * 4000 + b"\r\n"]
)
async def test_the_largest_replies_of_a_replaced_server_hold_up_no_loop(item: bytes) -> None:
    reply = b"*100000\r\n" + item * min(100_000, (4 << 20) // len(item))
    async with server_that_answers(reply) as url, connect(url, timeout_seconds=1.0) as client:
        index = RedisPrefixIndex(client, CLUSTER, is_reader=True)
        async with free_loop(MOST_LINES):
            for call in (index.lookup(NAMES), index.directory(), index.info()):
                with pytest.raises(PrefixIndexError):
                    await call


async def test_a_replaced_server_that_answers_too_much_is_soon_not_asked() -> None:
    """Each answer is within the parser's bounds, and reading it takes time."""
    reply = b"*2000\r\n" + b"$4\r\na\0li\r\n:1\r\n" * 1000
    async with server_that_answers(reply) as url, connect(url, timeout_seconds=1.0) as client:
        lookup = PrefixLookup(
            RedisPrefixIndex(client, CLUSTER, is_reader=True), config=PrefixLookupConfig(timeout_seconds=1.0)
        )
        for _ in range(20):
            found = await lookup.lookup(NAMES, {WorkerId("a"): Incarnation("li")})
            assert not found.available
        assert lookup.num_lookups == PrefixLookupConfig().failures_to_open


async def test_a_holder_with_a_name_longer_than_any_of_ours_is_left_out() -> None:
    names = b"w" * 2000 + b"\0" + b"i" * 2000, b"w\0i"
    lengths = b",".join(b"%d" % len(name) for name in names)
    fields = (b"1", b"4", pack_berths([1, 2]), b"", b"roster", b"1,2", lengths, b"".join(names))
    reply = b"*8\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(field), field) for field in fields)
    async with server_that_answers(reply) as url, connect(url, timeout_seconds=1.0) as client:
        found = await RedisPrefixIndex(client, CLUSTER, is_reader=True).lookup(NAMES)
    assert [holder.worker_id for holder in found] == ["w"]
