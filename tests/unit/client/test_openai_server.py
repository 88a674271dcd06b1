"""The HTTP client of `bench --url` and `run-batch`: every form of HTTP/1.1 that servers write, and their failures."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from blockyard.deploy.requests.openai_server import CallFailed, OpenAIServer, ServerUrl
from hypothesis import given, settings
from hypothesis import strategies as st

Write = Callable[[asyncio.StreamWriter], Awaitable[None] | None]
EVENTS = [{"choices": [{"text": word}]} for word in ("one", "two ✓", "three")]
STREAM = (
    "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in EVENTS) + "data: [DONE]\n\n"
)


@contextlib.asynccontextmanager
async def scripted(*answers: bytes, closes: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server whose answers are these bytes, one to each call, and the heads of the calls that it got."""
    heads: list[bytes] = []
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while left:
                heads.append(head := await reader.readuntil(b"\r\n\r\n"))
                length = next(
                    (line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), b": 0"
                )
                await reader.readexactly(int(length.split(b": ")[1]))
                writer.write(left.pop(0))
                await writer.drain()
                if closes or not left:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        server.close()


def whole(body: str, status: str = "200 OK", **headers: str) -> bytes:
    raw = body.encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(raw)}\r\n{more}\r\n".encode() + raw


def chunked(body: str, sizes: list[int]) -> bytes:
    raw, pieces = body.encode(), []
    while raw:
        size = sizes.pop(0) if sizes else len(raw)
        pieces.append(raw[:size])
        raw = raw[size:]
    chunks = b"".join(b"%x;note=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTRANSFER-ENCODING: chunked\r\n\r\n" + chunks + b"0\r\nTrailer: x\r\n\r\n"


async def events(url: str, **options: Any) -> list[dict[str, Any]]:
    async with OpenAIServer(ServerUrl.parse(url), **options) as server:
        return [event async for event in server.events("/v1/completions", {"prompt": "x"})]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60))
def test_events_are_whole_however_they_are_cut_into_chunks(sizes: list[int]) -> None:
    async def run() -> list[dict[str, Any]]:
        async with scripted(chunked(STREAM, sizes)) as (url, _):
            return await events(url)

    assert asyncio.run(run()) == EVENTS


@pytest.mark.parametrize(
    "head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"]
)
async def test_a_stream_may_also_have_a_length_or_end_with_its_connection(head: bytes) -> None:
    body = STREAM.replace("\n", "\r\n").encode()
    async with scripted(head.replace(b"%d", str(len(body)).encode()) + body, closes=True) as (url, _):
        assert await events(url) == EVENTS


async def test_a_connection_is_used_again_and_one_that_was_closed_meanwhile_is_no_failure() -> None:
    answer = whole('{"data": [{"id": "m"}]}')
    async with (
        scripted(answer, b"HTTP/1.1 100 Continue\r\n\r\n" + answer) as (url, heads),
        OpenAIServer(ServerUrl.parse(f"{url}/below/v1/"), key="k") as server,
    ):
        assert [await server.models() for _ in range(2)] == [[{"id": "m"}]] * 2
    assert heads[0].startswith(b"GET /below/v1/models HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in heads[0]
    async with (
        scripted(answer, answer, closes=True) as (url, heads),
        OpenAIServer(ServerUrl.parse(url)) as server,
    ):
        for _ in range(2):
            await server.models()
    assert len(heads) == 2


@pytest.mark.parametrize(
    ("answer", "reason", "told"),
    [
        (whole('{"error": {"message": "no", "code": "model_not_found"}}', "404 X"), "MODEL_NOT_FOUND", "no"),
        (whole('{"error": {"message": "slow", "code": 429, "type": "busy"}}', "429 X"), "BUSY", "slow"),
        (whole('{"message": "vLLM of old", "code": 400}', "400 X"), "HTTP_400", "vLLM of old"),
        (whole('{"detail": "of FastAPI"}', "405 X"), "HTTP_405", "of FastAPI"),
        (whole("<html>", "502 X"), "HTTP_502", "answered HTTP 502"),
        (
            whole('data: {"error": {"message": "worker lost", "code": "worker_lost"}}\n\n'),
            "WORKER_LOST",
            "lost",
        ),
        (whole('data: {"choices": []}\n\n'), "STREAM_CUT_OFF", "ended a stream before"),
        (whole("data: nonsense\n\n"), "NO_JSON", "is not JSON"),
        (chunked(STREAM, [])[:-30], "CONNECTION_LOST", "closed the connection during a call"),
        (b"HTTP/1.1 200", "CONNECTION_LOST", "closed the connection during a call"),
        (b"SSH-2.0-x\r\n\r\n", "NOT_HTTP", "does not speak HTTP"),
        (b"\x00\x00\x12\x04", "NOT_HTTP", "is it a gRPC or a TLS port"),
    ],
)
async def test_each_failure_has_a_word_and_a_sentence(answer: bytes, reason: str, told: str) -> None:
    async with scripted(answer) as (url, _):
        with pytest.raises(CallFailed, match=told) as caught:
            await events(url)
    assert caught.value.reason == reason


async def test_a_server_that_says_nothing_is_given_up() -> None:
    async with scripted(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"") as (url, _):
        with pytest.raises(CallFailed, match=r"http://\S+ did not answer within 0.1 s") as caught:
            await events(url, timeout_seconds=0.1)
    assert caught.value.reason == "DEADLINE_EXCEEDED"


def test_a_url_may_name_the_path_of_the_api_and_what_is_no_servers_url_is_refused() -> None:
    assert str(ServerUrl.parse("https://h/openai/v1/")) == "https://h:443/openai"
    assert str(ServerUrl.parse("http://[::1]:8000/v1")) == "http://[::1]:8000"
    for url in ("", "h:1", "ftp://h", "http://", "http://h:x", "http://u:p@h", "http://h/?a=b"):
        with pytest.raises(ValueError, match="URL"):
            ServerUrl.parse(url)
