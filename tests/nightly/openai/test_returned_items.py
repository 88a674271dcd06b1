"""Items that come back: by a reference to a stored response, or whole with their reasoning encrypted.

The model must see what it saw before, so each test compares the worker's prompt with that of the items sent whole.
"""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from blockyard.router.openai.responses import stored
from blockyard.router.openai.responses.items import item_id
from blockyard.router.sealed_records import SealedRecords, TextSeal

from tests.unit.openai.rig import CALL, FLAT_WEATHER, SECRET, TEMPLATE, Tokens, config, prompt_of

from .ai_sdk_bodies import BODIES, SAID, TEXTS, THOUGHTS, filled, first_named
from .rig import House, running_house

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("waiting_for_redis")]

ASKED: dict[str, Any] = {"model": "demo", "tools": [FLAT_WEATHER]}
ENCRYPTED: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "store": False}
THOUGHT = "I must look."
SAYS = f"{THOUGHT}</think>\n\nI look.\n{CALL}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory, tokens: Tokens) -> AsyncIterator[House]:
    """Two routers of a model that reasons."""
    async with running_house(tmp_path_factory.mktemp("redis"), tokens, chat_template=TEMPLATE) as running:
        yield running


async def answered(house: House, router: int = 0, **asked: Any) -> tuple[dict[str, Any], str]:
    """Return a response, and the prompt that its worker got."""
    made = await house.clients[router].responses.create(**{**ASKED, **asked})
    return made.to_dict(mode="json"), prompt_of(house.workers[router])


def referring(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


async def test_every_type_of_item_comes_back_by_its_id_from_several_responses(house: House) -> None:
    house.says(SAYS)
    question = {"role": "user", "content": "Is it mild?"}
    first, _ = await answered(house, input=[question])
    thought, text, call = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Quite mild."}
    house.says("Good.</think>Yes.")
    second, _ = await answered(house, 1, input=[question, *first["output"], result])
    inputs = await house.clients[0].responses.input_items.list(second["id"], order="asc")
    asked, *_, given = (item.to_dict() for item in inputs.data)
    assert (asked["type"], given["type"]) == ("message", "function_call_output")
    items = [asked, thought, text, call, given, *second["output"]]
    more = {"role": "user", "content": "And Rome?"}
    _, whole = await answered(house, input=[question, *first["output"], result, *second["output"], more])
    assert whole.count("Quite mild.") == whole.count(THOUGHT) == 1
    for router, untyped in ((0, False), (1, True)):
        references = [{"id": item["id"]} if untyped else referring(item) for item in items]
        third, prompt = await answered(house, router, input=[*references, more])
        assert prompt == whole
    # What a reference became is kept with its own id, so that it can be referred to once more.
    listed = await house.clients[0].responses.input_items.list(third["id"], order="asc")
    assert [item.id for item in listed.data][:-1] == [item["id"] for item in items]
    _, prompt = await answered(house, input=[*map(referring, listed.to_dict()["data"])])  # type: ignore[arg-type]
    assert prompt == whole


async def test_references_stand_beside_a_previous_response(house: House) -> None:
    house.says("Hm.</think>Blue.")
    other, _ = await answered(house, input="A colour?")
    house.says(SAYS)
    first, _ = await answered(house, input="Is it mild?")
    result = {
        "type": "function_call_output",
        "call_id": first["output"][-1]["call_id"],
        "output": "Quite mild.",
    }
    chain = {"previous_response_id": first["id"]}
    blue = other["output"][-1]
    _, plain = await answered(house, **chain, input=[result])
    _, prompt = await answered(house, 1, **chain, input=[*map(referring, first["output"]), result])
    assert prompt == plain, "an item that the previous response has is not repeated"
    _, whole = await answered(house, **chain, input=[result, blue])
    _, prompt = await answered(house, 1, **chain, input=[result, referring(blue)])
    assert prompt == whole
    await answered(house, **chain, input=[referring(first["output"][0])])


@pytest.mark.parametrize("mode", BODIES)
async def test_what_the_ai_sdk_sends_in_five_turns_is_what_the_model_saw_and_wrote(
    house: House, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    reads: list[str] = []
    get = SealedRecords.get

    async def noted(self: SealedRecords, name: Any) -> bytes | None:
        reads.append(name.record_id)
        return await get(self, name)

    monkeypatch.setattr(SealedRecords, "get", noted)
    _, body = BODIES[mode]
    outputs: list[list[dict[str, Any]]] = []
    sent: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    """The same items as they were made, without references and encryption."""
    for item in body["input"]:
        found = first_named(item)
        if found is not None and found[0] == len(outputs):
            house.says(SAID[sent[-1].get("role") != "user"])
            made, prompt = await answered(house, len(outputs) % 2, **{**body, "input": sent})
            for number, (thought, text) in enumerate(zip(THOUGHTS, TEXTS, strict=True)):
                assert prompt.count(f"<think>{thought}</think>{text}") == (len(outputs) + 1 - number) // 2
            outputs.append([dict(one) for one in made["output"]])
        sent.append(filled(item, outputs))
        whole.append(sent[-1])
        if found is not None and item.get("type") != "function_call_output":
            whole[-1] = {**outputs[found[0]][found[1]], "encrypted_content": None}
    assert len(outputs) == 9
    assert len(reads) == (8 if mode == "stored" else 0), "a turn needs one read, of the response before it"
    _, prompt = await answered(house, **{**body, "input": sent})
    _, same = await answered(house, **{**body, "input": whole})
    assert prompt == same


async def test_an_unknown_item_looks_like_another_tenants(house: House) -> None:
    house.says("Hm.</think>Yes.")
    made, _ = await answered(house, input="secret")
    gone, _ = await answered(house, input="secret")
    await house.clients[0].responses.delete(gone["id"])
    unkept, _ = await answered(house, input="secret", store=False)
    said = []
    for client, known in (
        (house.stranger, made["output"][0]["id"]),
        (house.clients[1], gone["output"][0]["id"]),
        (house.clients[1], unkept["output"][0]["id"]),
        (house.clients[1], item_id("message", made["id"], 99)),
        (house.clients[1], item_id("message", "resp_" + "1" * 48, 0)),
        (house.clients[1], "msg_1"),
        (house.clients[1], ""),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(
                model="demo",
                input=[{"role": "user", "content": "x"}, {"type": "item_reference", "id": known}],
            )
        said.append((caught.value.body, caught.value.code, caught.value.param))
    assert said == [said[0]] * len(said)
    assert said[0][1:] == ("item_not_found", "input[1].id")


async def test_a_reference_of_the_wrong_form_is_refused(house: House) -> None:
    for reference, param in (
        ({"type": "item_reference"}, "input[1].id"),
        ({"type": "item_reference", "id": 1}, "input[1].id"),
        ({"type": "item_reference", "id": None}, "input[1].id"),
        ({"type": "item_reference", "id": "msg_1", "content": "x"}, "input[1]"),
        ({"id": "msg_1", "content": "x"}, "input[1]"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await answered(house, input=[{"role": "user", "content": "x"}, reference])
        assert caught.value.param == param


async def test_references_are_bounded_and_not_repeated(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.says(SAYS)
    one, _ = await answered(house, input="Is it mild?")
    other, _ = await answered(house, input="Is it cold?")
    result = {"type": "function_call_output", "call_id": one["output"][-1]["call_id"], "output": "Mild."}
    later, _ = await answered(house, input=[*one["output"], result])
    listed = await house.clients[0].responses.input_items.list(later["id"])
    output = listed.to_dict()["data"][0]  # type: ignore[index]
    text, foreign = referring(one["output"][1]), referring(other["output"][1])
    for turns, param in (([text, text], "input[1].id"), ([referring(output)], "input[0].id")):
        with pytest.raises(openai.BadRequestError) as caught:
            await answered(house, input=turns)
        assert caught.value.param == param
    monkeypatch.setattr(stored, "MAX_REFERRED", 1)
    with pytest.raises(openai.BadRequestError, match="at most 1 stored responses"):
        await answered(house, input=[text, foreign])


async def test_encrypted_reasoning_comes_back_as_the_model_wrote_it(house: House) -> None:
    """At another router, with every field of an item that a client may leave out left out."""
    house.says(SAYS)
    question = {"role": "user", "content": "Is it mild?"}
    asked = {**ASKED, **ENCRYPTED, "reasoning": {"summary": "auto"}, "input": [question]}
    async with house.clients[0].responses.stream(**asked) as stream:
        first: Any = (await stream.get_final_response()).to_dict(mode="json")
    assert first["reasoning"]["summary"] == "auto"
    thought, text, call = first["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": THOUGHT}]
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert THOUGHT not in thought["encrypted_content"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Mild."}
    _, whole = await answered(
        house, input=[question, {**thought, "encrypted_content": None}, text, call, result]
    )
    assert f"<think>{THOUGHT}</think>I look." in whole
    bare = {"type": "reasoning", "encrypted_content": thought["encrypted_content"]}
    other = [{"type": "summary_text", "text": "Other."}]
    for returned in (
        thought,
        {**bare, "summary": []},
        {**bare, "content": [], "summary": other},
        {"type": "reasoning", "summary": thought["summary"]},
    ):
        _, prompt = await answered(house, 1, **ENCRYPTED, input=[question, returned, text, call, result])
        assert prompt == whole


async def test_encrypted_reasoning_of_others_is_refused(house: House) -> None:
    house.says("Hm.</think>Yes.")
    made, _ = await answered(house, **ENCRYPTED, input="x")
    sealed = made["output"][0]["encrypted_content"]
    own, foreign = (
        TextSeal.of("acme", kind="reasoning", cluster=config().cluster, secret=secret).sealed("Hm.")
        for secret in (SECRET, "the-secret-before")
    )

    def returned(content: str) -> list[Any]:
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": content}
        return [{"role": "user", "content": "x"}, thought]

    _, prompt = await answered(house, input=returned(own))
    assert "<think>Hm.</think>" in prompt
    damaged = (foreign, sealed[:-4], sealed + "AAAA", sealed + "\n", "gAAAAA", "\U0001f327")
    said = []
    for client, content in ((house.stranger, sealed), *((house.clients[1], one) for one in damaged)):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="demo", input=returned(content))
        said.append((caught.value.body, caught.value.code, caught.value.param))
    assert said == [said[0]] * len(said)
    assert said[0][1:] == ("invalid_encrypted_content", "input[1].encrypted_content")
