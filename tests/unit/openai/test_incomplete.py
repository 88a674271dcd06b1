"""Headers and bodies that never end: their size, number and time are bounded. Real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from blockyard.router.openai.http import body, protocol
from blockyard.router.services.options import MIN_MESSAGE_BYTES

from .rig import (
    CHAT,
    HELLO,
    Answer,
    FakeWorker,
    Gateway,
    Script,
    is_idle,
    read_answer,
    running_gateway,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

VALID = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
WHOLE = f"{HEAD}content-length: {len(VALID)}\r\n\r\n".encode() + VALID
CONTEXT = 512


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("goes_on", [False, True], ids=["stops", "a byte now and then"])
@pytest.mark.parametrize("begins_with", [b"", VALID], ids=["first request", "second request"])
async def test_a_head_that_never_ends_is_answered_when_its_time_is_over(
    gateway: Gateway, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, begins_with: bytes, goes_on: bool
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    reader, writer = await gateway.connect()
    async with asyncio.timeout(30):
        if begins_with:
            writer.write(WHOLE)
            assert (await read_answer(reader)).status == 200
        writer.write(b"GET /health HTTP/1.1\r\nx: ")
        dripping = asyncio.create_task(drip(writer)) if goes_on else None
        answer = await read_answer(reader)
        assert (answer.status, answer.error["code"]) == (408, "head_too_slow")
        assert answer.headers["connection"] == "close"
        assert answer.headers["server"] == "blockyard"
        with suppress(ConnectionError):
            assert await reader.read() == b""
        if dripping is not None:
            dripping.cancel()
    writer.close()


async def test_a_head_that_begins_in_the_packet_of_a_whole_request_has_no_more_time(
    gateway: Gateway, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    for begun in (b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\n"):
        reader, writer = await gateway.connect()
        async with asyncio.timeout(30):
            writer.write(WHOLE + begun)
            assert (await read_answer(reader)).status == 200
            answer = await read_answer(reader)
            assert (answer.status, answer.error["code"]) == (408, "head_too_slow")
            assert await reader.read() == b""
        writer.close()


async def test_a_connection_between_requests_may_be_silent_for_longer_than_a_head(
    gateway: Gateway, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    reader, writer = await gateway.connect()
    async with asyncio.timeout(30):
        for _ in range(3):
            writer.write(WHOLE)
            assert (await read_answer(reader)).status == 200
            await asyncio.sleep(0.25)
    writer.close()


async def drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"y")
        await asyncio.sleep(0.05)


async def test_a_connection_that_says_nothing_is_closed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    reader, writer = await gateway.connect()
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


async def test_heads_behind_a_running_stream_wait_in_the_client_and_are_answered_after_it(
    gateway: Gateway, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp has had a bound on requests of one connection since 3.14.1."""
    monkeypatch.setattr(worker, "script", lambda submit: Script(step_seconds=0.1))
    num_heads = 3000
    stream = json.dumps({"messages": HELLO, "max_tokens": 20, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await gateway.connect()
    writer.write(f"{HEAD}content-length: {len(stream)}\r\n\r\n".encode() + stream)
    writer.write(num_heads * (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + 8000 * b"y" + b"\r\n\r\n"))
    async with asyncio.timeout(60):
        await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        # The kernel holds some 10 MB of 24.
        assert writer.transport.get_write_buffer_size() > 4 * 2**20
        for _ in range(num_heads):
            assert (await read_answer(reader)).status == 200
    writer.close()


async def test_a_head_is_answered_when_it_is_too_large_however_many_lines_it_has(gateway: Gateway) -> None:
    """64 lines of 8 KiB would be held otherwise, by each connection."""
    reader, writer = await gateway.connect()
    writer.write(b"GET /health HTTP/1.1\r\n")
    for number in range(9):
        writer.write(b"x%d: " % number + b"y" * 4000 + b"\r\n")
        with suppress(ConnectionError):
            await writer.drain()
        await asyncio.sleep(0.01)
    async with asyncio.timeout(30):
        answer = await read_answer(reader)
    assert (answer.status, answer.error["code"]) == (431, "head_too_large")
    writer.close()


async def test_connections_beyond_their_number_are_told_so_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blockyard.router.openai.gateway.max_connections", lambda: 3)
    async with running_gateway() as gateway:
        reader, writer = await gateway.connect()
        others = [await gateway.connect() for _ in range(2)]
        async with asyncio.timeout(30):
            answer = await refused(gateway)
            assert (answer.status, answer.error["code"]) == (429, "overloaded")
            assert answer.headers["retry-after"]
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await read_answer(reader)).status == 200
            for _, other in others:
                other.close()
            while True:
                with suppress(asyncio.IncompleteReadError, ConnectionError):
                    if (await gateway.get("/v1/models")).status == 200:
                        break
                await asyncio.sleep(0.05)
        writer.close()


async def refused(gateway: Gateway) -> Answer:
    """Return what the server sends before any request."""
    reader, writer = await gateway.connect()
    answer = await read_answer(reader)
    assert await reader.read() == b""
    writer.close()
    return answer


@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "chunked"])
async def test_bodies_on_their_way_are_charged_to_one_budget(
    gateway: Gateway, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, is_chunked: bool
) -> None:
    """A large one finds no room; a small one always does; what has been held is given back."""
    intake = gateway.router.server.intake
    monkeypatch.setattr(intake, "_budget_bytes", 2 * 400_000)
    connections = [await gateway.connect() for _ in range(2)]
    piece = b" " * 300_000
    for _, writer in connections:
        if is_chunked:
            writer.write(f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode() + b"493e0\r\n" + piece)
        else:
            writer.write(f"{HEAD}content-length: 400000\r\n\r\n".encode() + piece)
    async with asyncio.timeout(30):
        answers = [asyncio.create_task(read_answer(reader)) for reader, _ in connections]
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        answer = done.pop().result()
        assert (answer.status, answer.error["code"]) == (429, "overloaded")
        assert answer.headers["retry-after"]
        await until(lambda: intake.held_bytes == 300_000 - body.FREE_BYTES)
        assert (await gateway.post(VALID)).status == 200
    for _, writer in connections:
        writer.close()
    await asyncio.wait(waiting)
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: intake.held_bytes == 0)
    await until(lambda: is_idle(gateway.router))


async def test_a_client_has_one_half_of_the_budget_on_both_ports(
    gateway: Gateway, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of gRPC that takes long holds all of it."""
    intake = gateway.router.server.intake
    monkeypatch.setattr(intake, "_budget_bytes", 2 * MIN_MESSAGE_BYTES)

    async def unsaid() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    call = gateway.router.channel.stream_unary("/blockyard.v1.InferenceService/Generate")(unsaid())
    await until(lambda: intake.held_bytes == MIN_MESSAGE_BYTES)
    answer = await gateway.post({"messages": HELLO, "user": "x" * 200_000})
    assert (answer.status, answer.error["code"]) == (429, "overloaded")
    assert "of this client" in answer.error["message"]
    call.cancel()
    await until(lambda: intake.held_bytes == 0)


async def test_a_body_of_small_numbers_is_refused_before_it_is_parsed(gateway: Gateway) -> None:
    """Each would become an object: half a second for the largest body of a large context."""
    most = body.max_values(CONTEXT)
    answer = await gateway.post(b'{"prompt": [' + b"1," * (most + 1) + b"1]}", "/v1/completions")
    assert answer.status == 400
    assert f"at most {most} values" in answer.error["message"]
    for text in ("," * 9000, '",' * 9000, "\\," * 9000, "[,{:" * 9000):
        raw = json.dumps({"user": text}).encode()
        assert body.parse_json(raw, most_values=1) == {"user": text}
