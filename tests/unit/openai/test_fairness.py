"""One call or one client keeps no other one waiting, with an auth file and without."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from blockyard.router.calls.bounds import client_address

from .rig import (
    COMPLETIONS,
    FakeWorker,
    Gateway,
    Script,
    Tokens,
    running_gateway,
    served_by,
    until,
    worker_of_model,
)

PROMPTS, OUTPUTS = 64, 16
LONG = {"max_tokens": 400, "ignore_eos": True}


@asynccontextmanager
async def before_a_slow_worker(**settings: Any) -> AsyncIterator[tuple[Gateway, FakeWorker]]:
    async with running_gateway(**settings) as gateway:
        worker = worker_of_model("a", script=lambda submit: Script(step_seconds=0.1))
        async with served_by(gateway, worker):
            yield gateway, worker


@asynccontextmanager
async def running(call: Any) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(call)
        try:
            yield
        finally:
            task.cancel()


@pytest.mark.parametrize("has_auth_file", [False, True])
async def test_while_a_call_of_many_prompts_runs_anothers_is_placed_before_its_remaining_ones(
    tokens: Tokens, has_auth_file: bool
) -> None:
    settings = {"auth_file": str(tokens.path)} if has_auth_file else {}
    shown = [f"Bearer {tokens.of[name]}" if has_auth_file else "" for name in ("ann", "bob")]
    async with before_a_slow_worker(**settings) as (gateway, worker):
        body = {"prompt": ["x"] * PROMPTS, "n": OUTPUTS, **LONG}
        async with running(gateway.post(body, COMPLETIONS, authorization=shown[0])):
            await until(lambda: len(worker.started) >= 2, seconds=30)
            short = {"prompt": "y", "max_tokens": 1}
            answer = await gateway.post(short, COMPLETIONS, authorization=shown[1], x_request_id="short")
            assert answer.status == 200, answer.body
            assert "short" in worker.started
            assert len(worker.started) < PROMPTS // 2, "the rest of the large call was placed before it"


async def test_a_call_of_more_outputs_than_the_limit_is_served_in_pieces() -> None:
    async with (
        running_gateway(max_requests=16) as gateway,
        served_by(gateway, worker_of_model("a")) as worker,
    ):
        num_running: list[int] = []
        worker.script = lambda submit: num_running.append(worker.num_running) or Script()  # type: ignore[func-returns-value]
        answer = await gateway.post({"prompt": ["x"] * 10, "n": 4, "max_tokens": 3}, COMPLETIONS)
        assert answer.status == 200, answer.body
        assert [choice["index"] for choice in json.loads(answer.body)["choices"]] == list(range(40))
        assert max(num_running) < 2, "two prompts of four outputs at once, of 16 that are admitted"


async def test_a_call_of_many_prompts_waits_where_a_client_of_the_same_address_has_filled_the_limit() -> None:
    async with before_a_slow_worker(max_requests=16) as (gateway, worker):
        others = {"prompt": ["x"] * 2, "n": 4, **LONG, "max_tokens": 20}
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(gateway.post(others, COMPLETIONS))
            await until(lambda: len(worker.started) == 2, seconds=30)
            # Its second prompt finds the limit reached, and is served once the others have ended.
            second = tasks.create_task(gateway.post({**others, "max_tokens": 1}, COMPLETIONS))
        assert first.result().status == 200
        assert second.result().status == 200, second.result().body


async def post_from(gateway: Gateway, address: str, body: dict[str, Any]) -> int:
    """The status of an answer to a client of this address."""
    host, _, port = gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
    try:
        writer.write(f"{head}\r\n\r\n".encode() + raw)
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


async def test_without_an_auth_file_one_address_cannot_take_all_of_a_limit() -> None:
    async with before_a_slow_worker(max_requests=16) as (gateway, _), asyncio.TaskGroup() as tasks:
        flood = [
            tasks.create_task(post_from(gateway, "127.0.0.1", {"prompt": "x", "n": 5, **LONG}))
            for _ in range(9)
        ]
        await until(lambda: sum(task.done() for task in flood) == 6, seconds=30)
        assert {task.result() for task in flood if task.done()} == {429}
        assert await post_from(gateway, "127.0.0.1", {"prompt": "y", "max_tokens": 1}) == 429
        assert await post_from(gateway, "127.0.0.2", {"prompt": "y", "max_tokens": 1}) == 200
        for task in flood:
            task.cancel()


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:127.0.0.1:1234", "@127.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:1234", "@2001:db8::/64"),
        ("ipv6:[2001:db8::2]:99", "@2001:db8::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "@fe80::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:1", "@10.0.0.1"),
        ("unix:", "@unix"),
        ("unix:/tmp/socket", "@unix"),
    ],
)
def test_a_client_without_a_name_is_known_by_its_address_and_not_by_its_port(peer: str, client: str) -> None:
    assert client_address(peer) == client
