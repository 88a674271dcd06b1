"""Answers of sessions on their way through two routers: what a worker is sent in the next turn, over HTTP and gRPC."""

import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
import redis
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.naming.block_hash import unpack_tokens
from blockyard.proto.text import load_tokenizer
from blockyard.proto.v1 import inference_pb2

from tests.unit.openai.rig import (
    MODEL,
    FakeWorker,
    Gateway,
    Script,
    running_gateway,
    until,
    waiting_for_redis,
    worker_of_model,
)
from tests.unit.parsing.families import other_tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENIZER = load_tokenizer(MODEL)
SAID = "def foo(bar):\n    return bar + 1, and the same once more"
CALL = '<tool_call>\n{"name":"read_file","arguments":{"path":"a.py","lines":[1,2]}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}]


def sampled(text: str) -> tuple[int, ...]:
    """Return tokens of a text and the end of an answer, as a model may sample them."""
    own = other_tokens(TOKENIZER, TOKENIZER.encode(text, add_special_tokens=False), random.Random(1))
    return (*own, TOKENIZER.eos_token_id)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    started = start_private_redis(tmp_path_factory.mktemp("redis"), password="of-the-admin")
    yield started
    started.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(server: RedisProcess) -> AsyncIterator[tuple[Gateway, Gateway]]:
    async with AsyncExitStack() as stack:
        stack.enter_context(waiting_for_redis())
        settings: dict[str, Any] = {"redis_url": server.url, "discovers_workers": False}
        one = await stack.enter_async_context(running_gateway(**settings))
        other = await stack.enter_async_context(running_gateway(**settings))
        yield one, other


@pytest_asyncio.fixture(loop_scope="module")
async def worker(gateways: tuple[Gateway, Gateway]) -> AsyncIterator[FakeWorker]:
    servers = [gateway.router.server for gateway in gateways]
    async with worker_of_model("a", script=lambda submit: answer_of(SAID)) as made:
        for server in servers:
            server.set_workers([made.address])
        await until(lambda: all(server.num_ready_workers == 1 for server in servers), seconds=30.0)
        yield made
        for server in servers:
            server.set_workers([])
    await until(lambda: all(server.num_ready_workers == 0 for server in servers), seconds=30.0)


def answer_of(text: str) -> Script:
    tokens = sampled(text)
    return Script(tokens=tokens, stop_token_at=len(tokens))


def prompts(worker: FakeWorker) -> list[list[int]]:
    return [unpack_tokens(submit.token_ids) for submit in worker.submits]


async def chat(gateway: Gateway, messages: list[Any], **fields: Any) -> dict[str, Any]:
    answer = await gateway.post({"messages": messages, "max_tokens": 200, **fields})
    assert answer.status == 200, answer.body
    message: dict[str, Any] = json.loads(answer.body)["choices"][0]["message"]
    return message


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_the_next_turn_repeats_the_sampled_tokens_on_any_router_over_any_protocol(
    gateways: tuple[Gateway, Gateway], worker: FakeWorker
) -> None:
    one, other = gateways
    messages: list[Any] = [user("Say it.")]
    messages += [await chat(one, messages, session_id="talk"), user("Go on.")]
    messages += [await chat(other, messages, session_id="talk"), user("And on.")]
    turns = inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
    )
    request = inference_pb2.GenerateRequest(chat=turns, session_id="talk", sampling={"max_tokens": 200})
    await one.router.inference.Generate(request)
    await chat(one, messages, stream=False)
    first, second, third, without = prompts(worker)
    answer = list(sampled(SAID))
    assert second[: len(first) + len(answer)] == first + answer
    assert third[: len(second) + len(answer)] == second + answer
    assert without[: len(first) + len(answer)] != first + answer, "without the session"
    assert TOKENIZER.decode(without) == TOKENIZER.decode(third)


async def test_a_call_keeps_the_models_spelling(
    gateways: tuple[Gateway, Gateway], worker: FakeWorker
) -> None:
    worker.script = lambda submit: answer_of(CALL)
    one, other = gateways
    asked = {"tools": TOOLS, "session_id": "calls"}
    message = await chat(one, [user("Read it.")], **asked)
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "x = 1"}
    await chat(other, [user("Read it."), message, result], **asked)
    first, second = prompts(worker)
    answer = list(sampled(CALL))
    assert second[: len(first) + len(answer)] == first + answer


async def test_sessions_of_another_name_salt_or_tenant_know_no_answer_of_this_one(
    gateways: tuple[Gateway, Gateway], worker: FakeWorker
) -> None:
    one, other = gateways
    message = await chat(one, [user("Say it.")], session_id="mine")
    messages = [user("Say it."), message, user("Go on.")]
    for fields in ({"session_id": "other"}, {"session_id": "mine", "cache_salt": "salt"}):
        await chat(other, messages, **fields)
    body = {"messages": messages, "max_tokens": 200, "session_id": "mine"}
    assert (await other.post(body, blockyard_tenant="another")).status == 200
    await chat(other, messages)
    first, *others = prompts(worker)
    assert len({tuple(prompt) for prompt in others}) == 1
    await chat(other, messages, session_id="mine")
    assert prompts(worker)[-1][: len(first)] == first
    assert prompts(worker)[-1] != others[0]


async def test_requests_without_an_answer_of_their_session_ask_redis_nothing(
    gateways: tuple[Gateway, Gateway], worker: FakeWorker, server: RedisProcess
) -> None:
    one, _ = gateways

    def calls() -> dict[str, int]:
        with redis.Redis.from_url(server.url) as admin:
            stats = admin.info("commandstats")
        return {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("getex", "append")}

    before = calls()
    talk = [user("Say it."), {"role": "assistant", "content": SAID}, user("Go on.")]
    await chat(one, talk)
    assert calls() == before
    await chat(one, talk[:1], session_id="first-turn")
    # The record is new: an empty one gets its expiry, and then the answer.
    assert calls() == {"getex": before["getex"] + 1, "append": before["append"] + 2}


async def test_a_truncated_prompt_keeps_no_answer(
    gateways: tuple[Gateway, Gateway], worker: FakeWorker
) -> None:
    one, _ = gateways
    fields = {"session_id": "cut", "truncate_prompt_tokens": 8}
    message = await chat(one, [user("Say it.")], **fields)
    messages = [user("Say it."), message, user("Go on.")]
    await chat(one, messages, session_id="cut")
    await chat(one, messages)
    _, with_session, without = prompts(worker)
    assert with_session == without
