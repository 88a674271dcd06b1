"""Stored responses: two routers share them by a real Redis, sealed and by tenant. Without it no answer is lost."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import redis
from blockyard.router.admission.rate_limits import RateLimit
from blockyard.router.admission.token_entries import new_token
from blockyard.router.sealed_records import SealedRecords

from tests.unit.openai.rig import (
    CALL,
    FLAT_WEATHER,
    RESPONSES,
    Tokens,
    answers,
    ended,
    jsonl,
    ledger_of,
    prompt_of,
    running_gateway,
    says,
    served_by,
    started,
    worker_of_model,
)

from .rig import House, running_house

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("waiting_for_redis")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory, tokens: Tokens) -> AsyncIterator[House]:
    async with running_house(tmp_path_factory.mktemp("redis"), tokens) as running:
        yield running


async def test_another_router_goes_on_from_a_response_with_all_its_items(house: House) -> None:
    house.says(f"I look.\n{CALL}")
    asked: dict[str, Any] = {"model": "demo", "tools": [FLAT_WEATHER]}
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


async def test_a_prefetch_and_store_false_keep_nothing(house: House) -> None:
    house.says("Hello.")
    before = house.keys()
    create = house.clients[0].responses.create
    await create(model="demo", input="x", extra_body={"prefetch": True})
    made = await create(model="demo", input="x", store=False)
    assert (made.model_extra or {})["store"] is False
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


async def test_a_line_of_a_batch_goes_on_from_a_stored_response_of_its_tenant(
    house: House, tokens: Tokens, tmp_path: Path
) -> None:
    settings = {"batch_dir": str(tmp_path), "redis_url": house.redis.url, "auth_file": str(tokens.path)}
    house.says("It is mild.")
    first = await house.clients[0].responses.create(model="demo", input="Is it mild?")
    async with (
        running_gateway(**settings) as gateway,
        served_by(gateway, worker_of_model("a")) as worker,
        gateway.client(api_key=tokens.of["ann"]) as client,
    ):
        says(worker, "Yes.")
        previous = {"next": first.id, "none": "resp_" + "0" * 48}
        lines = [
            {
                "custom_id": name,
                "method": "POST",
                "url": RESPONSES,
                "body": {"model": "demo", "input": "And Rome?"},
            }
            for name in previous
        ]
        for one in lines:
            one["body"]["previous_response_id"] = previous[one["custom_id"]]  # type: ignore[index]
        done = await ended(client, await started(client, jsonl(*lines), RESPONSES))
        found = await answers(client, done.output_file_id)
        answer = found["next"]["response"]["body"]
        assert answer["previous_response_id"] == first.id
        for text in ("Is it mild?", "It is mild.", "And Rome?"):
            assert text in prompt_of(worker)
        errors = await answers(client, done.error_file_id)
        error = errors["none"]["response"]["body"]["error"]
        assert (error["code"], error["param"]) == ("response_not_found", "previous_response_id")
    later = await house.clients[1].responses.retrieve(answer["id"])
    assert later.output_text == "Yes.", "answers of lines are stored as those of calls are"


async def test_a_response_that_is_refused_reads_no_earlier_one(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Any] = []
    get = SealedRecords.get

    async def noted(self: SealedRecords, name: Any) -> bytes | None:
        reads.append(name)
        return await get(self, name)

    monkeypatch.setattr(SealedRecords, "get", noted)
    few, entry = new_token("few", "user", None, limit=RateLimit(requests_per_minute=3))
    path = tmp_path / "tokens.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps({"tokens": [entry]}))
    async with (
        running_gateway(redis_url=house.redis.url, auth_file=str(path), max_requests=4) as gateway,
        served_by(gateway, worker_of_model("a")),
        gateway.client(api_key=few) as client,
    ):
        asked: dict[str, Any] = {"model": "demo", "input": "two", "max_output_tokens": 3}
        asked["previous_response_id"] = (await client.responses.create(**asked)).id
        with ledger_of(gateway).charge(1, outputs=4, tenant="another"):
            with pytest.raises(openai.RateLimitError) as full:
                await client.responses.create(**asked)
            assert (full.value.code, reads) == ("overloaded", [])
        for _ in range(2):
            await client.responses.create(**asked)
        assert len(reads) == 2, "a read takes nothing of the limit: three calls were allowed"
        with pytest.raises(openai.RateLimitError) as limited:
            await client.responses.create(**asked)
        assert (limited.value.code, len(reads)) == ("rate_limited", 2)


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
