"""Stored responses: two routers share them by a real Redis, sealed and by tenant. Without it no answer is lost."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import redis
from blockyard.deploy.machine.redis_server import RedisProcess, redis_user, start_private_redis
from blockyard.router import sealed_records
from openai import AsyncOpenAI

from .rig import FakeWorker, Gateway, Tokens, running_gateway, served_by, worker_of_model
from .test_responses import RESPONSES, WEATHER
from .test_tools import CALL, prompt_of, says

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class House:
    """Two routers with one worker each, and their Redis."""

    redis: RedisProcess
    gateways: list[Gateway]
    workers: list[FakeWorker]
    clients: list[AsyncOpenAI]
    """One for each router, of the tenant acme."""
    stranger: AsyncOpenAI
    """The client of a user of the tenant bravo, at the second router."""

    def says(self, text: str) -> None:
        for worker in self.workers:
            says(worker, text)

    def keys(self) -> list[bytes]:
        with redis.Redis.from_url(self.redis.url) as admin:
            return list(admin.scan_iter("*:records:*"))


@pytest.fixture(autouse=True)
def waiting_for_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Redis may take longer than the half second that routers wait."""
    monkeypatch.setattr(sealed_records, "TIMEOUT_SECONDS", 20.0)


@asynccontextmanager
async def running_house(folder: Path, tokens: Tokens, **settings: Any) -> AsyncIterator[House]:
    user = redis_user("router", "default")
    process = start_private_redis(folder, password="of-the-admin", users=(user,))
    try:
        async with AsyncExitStack() as stack:
            gateways = []
            workers = []
            for name in ("a", "b"):
                gateway = await stack.enter_async_context(
                    running_gateway(redis_url=process.url_of(user), auth_file=str(tokens.path), **settings)
                )
                gateways.append(gateway)
                workers.append(await stack.enter_async_context(served_by(gateway, worker_of_model(name))))
            clients = [
                await stack.enter_async_context(gateway.client(api_key=tokens.of[name]))
                for gateway, name in zip([*gateways, gateways[1]], ("ann", "amy", "bob"), strict=True)
            ]
            yield House(process, gateways, workers, clients[:2], clients[2])
    finally:
        process.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory, tokens: Tokens) -> AsyncIterator[House]:
    async with running_house(tmp_path_factory.mktemp("redis"), tokens) as running:
        yield running


async def test_another_router_goes_on_from_a_response_with_all_its_items(house: House) -> None:
    house.says(f"I look.\n{CALL}")
    asked: dict[str, Any] = {"model": "demo", "tools": [WEATHER]}
    first = await house.clients[0].responses.create(**asked, input="Is it mild?", instructions="Be brief.")
    call = first.output[-1]
    assert call.type == "function_call"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Quite mild."}
    house.says("Yes.")
    second = await house.clients[1].responses.create(
        **asked, input=[output], previous_response_id=first.id, instructions="Be long."
    )
    assert (second.output_text, second.previous_response_id) == ("Yes.", first.id)
    prompt = prompt_of(house.workers[1])
    for text in ("Be long.", "Is it mild?", "I look.", "Zürich", "Quite mild."):
        assert text in prompt
    assert "Be brief." not in prompt, "instructions are those of one request"
    third = await house.clients[0].responses.create(
        **asked, input="And Rome?", previous_response_id=second.id
    )
    assert third.output_text == "Yes."
    assert "Quite mild." in prompt_of(house.workers[0])


async def test_a_stored_response_is_read_listed_and_deleted(house: House) -> None:
    house.says("Hello there.")
    client = house.clients[0]
    async with client.responses.stream(model="demo", input="one", metadata={"a": "b"}) as stream:
        made = await stream.get_final_response()
    read = await house.clients[1].responses.retrieve(made.id)
    assert (read.output_text, read.metadata, read.usage) == ("Hello there.", {"a": "b"}, made.usage)
    later = await client.responses.create(model="demo", input="two", previous_response_id=made.id)
    items = [item async for item in client.responses.input_items.list(later.id, limit=1)]
    assert [item.type for item in items] == ["message"] * 3
    assert [item.content[0].text for item in items] == ["two", "Hello there.", "one"]  # type: ignore[union-attr]
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.retrieve(made.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="demo", input="x", previous_response_id=made.id)
    assert caught.value.param == "previous_response_id"
    assert (await client.responses.retrieve(later.id)).output_text == "Hello there.", (
        "it needs no other record"
    )


async def test_another_tenant_cannot_name_a_response(house: House) -> None:
    house.says("Hello.")
    made = await house.clients[0].responses.create(model="demo", input="secret")
    for call in (
        house.stranger.responses.retrieve(made.id),
        house.stranger.responses.delete(made.id),
        house.stranger.responses.create(model="demo", input="x", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    assert (await house.clients[0].responses.retrieve(made.id)).id == made.id


async def test_redis_holds_no_text_and_every_record_expires(house: House) -> None:
    house.says("A telltale answer.")
    await house.clients[0].responses.create(model="demo", input="A telltale question.")
    with redis.Redis.from_url(house.redis.url) as admin:
        keys = house.keys()
        assert keys
        for key in keys:
            assert b"telltale" not in admin.get(key)
            assert 0 < admin.ttl(key) <= 24 * 3600


async def test_a_prefetch_keeps_nothing(house: House) -> None:
    house.says("Hello.")
    before = house.keys()
    await house.clients[0].responses.create(model="demo", input="x", extra_body={"prefetch": True})
    assert house.keys() == before


async def test_store_false_keeps_nothing(house: House) -> None:
    house.says("Hello.")
    before = house.keys()
    made = await house.clients[0].responses.create(model="demo", input="x", store=False)
    assert made.model_extra is not None
    assert made.model_extra["store"] is False
    assert house.keys() == before


async def test_a_record_that_somebody_changed_is_unknown(house: House) -> None:
    house.says("Hello.")
    before = set(house.keys())
    made = await house.clients[0].responses.create(model="demo", input="x")
    (key,) = set(house.keys()) - before
    with redis.Redis.from_url(house.redis.url) as admin:
        admin.append(key, b"x")
    with pytest.raises(openai.NotFoundError):
        await house.clients[0].responses.retrieve(made.id)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_1", "limit=٣"])
async def test_a_wrong_query_is_refused(house: House, query: str) -> None:
    house.says("Hello.")
    made = await house.clients[0].responses.create(model="demo", input="x")
    name, value = query.split("=")
    with pytest.raises(openai.BadRequestError) as caught:
        await house.clients[0].responses.input_items.list(made.id, extra_query={name: value})
    assert caught.value.param == name


async def test_without_redis_the_answer_comes_and_says_that_it_is_not_stored(
    gateway: Gateway, worker: FakeWorker
) -> None:
    says(worker, "Hello.")
    answer = await gateway.post({"model": "demo", "input": "x", "store": True}, RESPONSES)
    assert (answer.status, json.loads(answer.body)["store"]) == (200, False)
    assert answer.headers["blockyard-ignored"] == "store"
    refused = await gateway.post({"model": "demo", "input": "x", "previous_response_id": "resp_1"}, RESPONSES)
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
    assert "for want of Redis" in refused.error["message"]
    assert (await gateway.get(f"{RESPONSES}/resp_1")).status == 400


async def test_while_redis_is_away_answers_come_and_earlier_ones_are_unavailable(house: House) -> None:
    """It runs last: Redis does not come back."""
    house.says("Hello.")
    client = house.clients[0]
    made = await client.responses.create(model="demo", input="x")
    await asyncio.to_thread(house.redis.stop)
    unkept = await client.responses.create(model="demo", input="x")
    assert unkept.model_extra is not None
    assert (unkept.output_text, unkept.model_extra["store"]) == ("Hello.", False)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.responses.retrieve(made.id)
    assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
