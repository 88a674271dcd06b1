"""Ends of calls: clients that disconnect or do not read, limits, and a router that shuts down."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import openai
import pytest
import pytest_asyncio

from .rig import (
    CHAT,
    HELLO,
    FakeWorker,
    Gateway,
    Script,
    expected_text,
    is_idle,
    running_gateway,
    until,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 8
MAX_TOKENS = 150


def stuck(submit: Any) -> Script:
    return Script(step_seconds=60.0)


def endless(submit: Any) -> Script:
    return Script(step_seconds=0.02)


def streaming(**fields: Any) -> bytes:
    """A whole request for a stream, as it goes over the wire."""
    body = json.dumps({"messages": HELLO, "stream": True, **fields}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight() -> AsyncIterator[Gateway]:
    async with running_gateway(max_requests=4) as running:
        yield running


@pytest.mark.parametrize(("stream", "script"), [(False, endless), (True, stuck), (True, endless)])
async def test_a_client_that_goes_cancels_its_request(
    gateway: Gateway, worker: FakeWorker, stream: bool, script: Any
) -> None:
    worker.script = script
    before = outcomes(gateway)
    reader, writer = await gateway.connect()
    writer.write(streaming(max_tokens=400, n=2, stream=stream))
    await until(lambda: worker.started)
    if stream and script is endless:
        assert b"200 OK" in await reader.readline()
    writer.transport.abort()
    await until(lambda: worker.cancelled)
    await until(lambda: is_idle(gateway.router))
    await until(lambda: outcomes(gateway)["CANCELLED"] > before["CANCELLED"])
    assert outcomes(gateway)["INTERNAL"] == 0, "a client that leaves is no fault of the cluster"


async def test_all_prompts_of_a_call_end_with_its_client(gateway: Gateway, worker: FakeWorker) -> None:
    worker.script = stuck
    async with gateway.client() as client:
        call = asyncio.create_task(client.completions.create(model="demo", prompt=["a", "b", "c"]))
        await until(lambda: len(worker.started) == 3)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await until(lambda: len(worker.cancelled) == 3)
    await until(lambda: is_idle(gateway.router))


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    quick = worker_of_model("a", script=lambda submit: Script(step_seconds=0.001))
    wanted = {"max_tokens": 480, "n": 8, "logprobs": True, "top_logprobs": 20}
    async with running_gateway(slow_reader_seconds=1.0) as gateway, gateway.router.workers(quick):
        host, _, port = gateway.address.rpartition(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(streaming(**wanted))
            await until(lambda: quick.started)
            await until(lambda: is_idle(gateway.router), 30.0)


async def test_beyond_the_limits_there_is_429_and_when_to_come_back(tight: Gateway) -> None:
    async with tight.router.workers(worker_of_model("a", script=stuck)) as (worker,):
        async with tight.client() as client:
            holding = asyncio.create_task(client.chat.completions.create(model="demo", messages=HELLO, n=4))
            await until(lambda: worker.started)
            for stream in (False, True):
                refused = await tight.post({"messages": HELLO, "stream": stream})
                assert (refused.status, refused.error["code"]) == (429, "overloaded")
                assert 1 <= int(refused.headers["retry-after"]) <= 30
                assert (
                    0 < int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"])
                )
                assert refused.headers["x-should-retry"] == "true"
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="demo", messages=HELLO)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
        await until(lambda: is_idle(tight.router))


async def test_openais_client_comes_back_by_itself(tight: Gateway) -> None:
    async with tight.router.workers(worker_of_model("a")), tight.client(max_retries=10) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model="demo", messages=HELLO, max_tokens=9, seed=i)
                for i in range(12)
            )
        )
    assert [answer.choices[0].message.content for answer in answers] == [
        expected_text(i, 9) for i in range(12)
    ]


async def test_without_a_worker_there_is_503() -> None:
    async with running_gateway(no_worker_seconds=0.1) as lonely:
        for stream in (False, True):
            answer = await lonely.post({"messages": HELLO, "stream": stream})
            assert (answer.status, answer.error["code"]) == (503, "no_workers")
            assert answer.headers["x-should-retry"] == "true"


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_an_ipv6_address_is_in_brackets_as_for_grpc() -> None:
    async with running_gateway(host="[::1]") as gateway:
        assert gateway.address.startswith("[::1]:")
        assert (await gateway.get("/v1/models")).status == 200


def outcomes(gateway: Gateway) -> Counter[str]:
    """How requests have ended, a second old at most."""
    requests = gateway.router.server.readings.get("requests", {})
    assert isinstance(requests, Mapping)
    return Counter({name: int(number) for name, number in requests.items()})
