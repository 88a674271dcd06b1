"""Ends of calls: clients that disconnect or do not read, limits, and a router that shuts down."""

import asyncio
import json
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.unit.router.test_main import ROUTER

from .rig import (
    CHAT,
    HELLO,
    MODEL,
    SECRET,
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
    body = json.dumps({"messages": HELLO, "max_tokens": 400, "n": 2, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await gateway.connect()
    writer.write(head.encode() + body)
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
    async with (
        running_gateway(slow_reader_seconds=1.0) as gateway,
        gateway.router.workers(worker_of_model("a", script=lambda submit: Script(step_seconds=0.001))) as (
            worker,
        ),
    ):
        await _does_not_read(gateway, worker)


async def _does_not_read(gateway: Gateway, worker: FakeWorker) -> None:
    wanted = {
        "messages": HELLO,
        "max_tokens": 480,
        "n": 8,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
    }
    body = json.dumps(wanted).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    host, _, port = gateway.address.rpartition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head.encode() + body)
        await until(lambda: worker.started)
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


async def test_a_router_that_is_told_to_end_finishes_every_stream_and_says_so_to_new_ones() -> None:
    async with worker_of_model("a", script=endless) as worker:
        process = await asyncio.create_subprocess_exec(
            *(
                *ROUTER,
                "--model",
                str(MODEL),
                "--model-name",
                "demo",
                "--worker",
                worker.address,
                "--http-port",
                "0",
            ),
            env={**os.environ, "BLOCKYARD_CLUSTER_SECRET": SECRET},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            log = (await asyncio.wait_for(process.stderr.readuntil(b"/v1\n"), 60)).decode()
            address = re.findall(r"http://(\S+)/v1", log)[0]
            async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0) as client:
                await until(lambda: has_status(client, "/health", 200), 30.0)
                begun: set[int] = set()
                streams = [asyncio.create_task(streamed(client, seed, begun)) for seed in range(NUM_STREAMS)]
                await until(lambda: len(begun) == NUM_STREAMS, 60.0)
                process.send_signal(signal.SIGTERM)
                await until(lambda: has_status(client, "/health", 503), 30.0)
                with pytest.raises(openai.InternalServerError) as refused:
                    await client.chat.completions.create(model="demo", messages=HELLO)
                assert (refused.value.status_code, refused.value.code) == (503, "router_draining")
                assert not any(stream.done() for stream in streams), "they were too short to prove anything"
                for seed, text in enumerate(await asyncio.gather(*streams)):
                    assert text == expected_text(seed, MAX_TOKENS)
            async with asyncio.timeout(30):
                _, rest = await process.communicate()
            assert process.returncode == 0
            assert b"Traceback" not in rest
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def outcomes(gateway: Gateway) -> Counter[str]:
    """How requests have ended, a second old at most."""
    requests = gateway.router.server.readings.get("requests", {})
    assert isinstance(requests, Mapping)
    return Counter({name: int(number) for name, number in requests.items()})


async def has_status(client: AsyncOpenAI, path: str, status: int) -> bool:
    url = str(client.base_url).removesuffix("/v1/") + path
    return bool((await client._client.get(url)).status_code == status)


async def streamed(client: AsyncOpenAI, seed: int, begun: set[int]) -> str:
    stream = await client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=MAX_TOKENS, seed=seed, stream=True
    )
    text = ""
    async for chunk in stream:
        begun.add(seed)
        text += chunk.choices[0].delta.content or ""
    return text
