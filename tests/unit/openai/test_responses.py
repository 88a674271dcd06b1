"""Responses with OpenAI's own client and types: what the worker is asked, and what an output becomes, whole and
streamed."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.responses import Response

from .rig import (
    ARGUMENTS,
    CALL,
    FLAT_WEATHER,
    RESPONSES,
    TEMPLATE,
    FakeWorker,
    Gateway,
    Script,
    events_of,
    prompt_of,
    running_gateway,
    says,
    served_by,
    told,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_text_is_answered_whole_with_all_that_the_type_requires(
    gateway: Gateway, client: AsyncOpenAI, worker: FakeWorker
) -> None:
    says(worker, "Hello there.")
    answer = await gateway.post({"model": "demo", "input": "hello", "metadata": {"a": "b"}}, RESPONSES)
    assert answer.status == 200, answer.body
    response = Response.model_validate(json.loads(answer.body), strict=True)
    assert (response.status, response.output_text, response.metadata) == (
        "completed",
        "Hello there.",
        {"a": "b"},
    )
    assert response.usage is not None
    assert response.usage.output_tokens == response.usage.total_tokens - response.usage.input_tokens > 0
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    made = await client.responses.create(
        model="demo", input=[{"role": "user", "content": "hello"}], instructions="Be."
    )
    assert made.output_text == "Hello there."
    assert "Be." in prompt_of(worker)


async def test_a_stream_is_told_by_events_of_openais_types(
    gateway: Gateway, client: AsyncOpenAI, worker: FakeWorker
) -> None:
    says(worker, "Hello there.")
    events = await events_of(gateway)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[4:-4].count("output_text.delta") == len(kinds) - 8 > 1
    assert [item["text"] for item in told(events)] == ["Hello there."]
    assert events[-1]["response"]["id"] == events[0]["response"]["id"]
    async with client.responses.stream(model="demo", input="hello") as stream:
        final = await stream.get_final_response()
    assert final.output_text == "Hello there."


async def test_calls_are_items_of_their_own(
    gateway: Gateway, client: AsyncOpenAI, worker: FakeWorker
) -> None:
    says(worker, f"I look.\n{CALL}\n{CALL}")
    events = await events_of(gateway, tools=[FLAT_WEATHER])
    output = told(events)
    assert [(item["type"], item["text"]) for item in output] == [
        ("message", "I look."),
        ("function_call", ARGUMENTS),
        ("function_call", ARGUMENTS),
    ]
    assert len({item["call_id"] for item in output[1:]}) == 2
    answer = await client.responses.create(model="demo", input="hello", tools=[FLAT_WEATHER])  # type: ignore[list-item]
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert '"name": "get_weather"' in prompt_of(worker)


async def test_an_answer_that_is_cut_is_incomplete(gateway: Gateway, worker: FakeWorker) -> None:
    says(worker, "Hello there.", is_cut=True)
    *_, last = events = await events_of(gateway, max_output_tokens=64)
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-2]["item"]["status"] == "incomplete"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking() -> AsyncIterator[tuple[Gateway, FakeWorker]]:
    """A router of a model that reasons."""
    async with (
        running_gateway(chat_template=TEMPLATE) as gateway,
        served_by(gateway, worker_of_model("t")) as worker,
    ):
        yield gateway, worker


async def test_reasoning_is_an_item_before_the_text_and_comes_back_with_its_call(
    thinking: tuple[Gateway, FakeWorker],
) -> None:
    gateway, worker = thinking
    says(worker, f"I must look.</think>\n\nI look.\n{CALL}")
    events = await events_of(gateway, tools=[FLAT_WEATHER])
    assert [(item["type"], item["text"]) for item in told(events)] == [
        ("reasoning", "I must look."),
        ("message", "I look."),
        ("function_call", ARGUMENTS),
    ]
    response = events[-1]["response"]
    usage = response["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    call = response["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Mild."}
    turns = [{"role": "user", "content": "hello"}, *response["output"], result]
    says(worker, "Good.</think>It is mild.")
    async with gateway.client() as client:
        last = await client.responses.create(model="demo", input=turns, tools=[FLAT_WEATHER])  # type: ignore[arg-type,list-item]
    assert [item.type for item in last.output] == ["reasoning", "message"]
    assert last.output_text == "It is mild."
    assert "assistant\n<think>I must look.</think>I look.<|im_end|>" in prompt_of(worker), (
        "one message of the assistant"
    )
    assert "<|im_start|>tool get_weather\nMild.<|im_end|>" in prompt_of(worker)


@pytest.mark.parametrize("field", ["summary", "generate_summary"])
@pytest.mark.parametrize("kind", [None, "auto", "concise", "detailed"])
async def test_a_summary_is_told_by_events_of_its_own_where_it_is_asked_for(
    thinking: tuple[Gateway, FakeWorker], field: str, kind: str | None
) -> None:
    gateway, worker = thinking
    says(worker, "I must look.</think>Yes.")
    asked = {"reasoning": {field: kind}, "include": ["reasoning.encrypted_content"]}
    events = await events_of(gateway, **asked)
    thought, _ = told(events)
    assert (thought["text"], thought["summed_up"]) == ("I must look.", "I must look." if kind else "")
    assert events[-1]["response"]["output"][0]["encrypted_content"], "the seal needs no Redis"
    assert events[-1]["response"]["reasoning"]["summary"] == kind
    prefix = "response.reasoning_summary_"
    kinds = [event["type"].removeprefix(prefix) for event in events if event["type"].startswith(prefix)]
    assert list(dict.fromkeys(kinds)) == (
        ["part.added", "text.delta", "text.done", "part.done"] if kind else []
    )


async def test_reasoning_is_turned_off_where_the_template_can(thinking: tuple[Gateway, FakeWorker]) -> None:
    gateway, worker = thinking
    says(worker, "Hello.")
    asked = {"model": "demo", "input": "x", "reasoning": {"effort": "none", "summary": "auto"}}
    answer = await gateway.post({**asked, "text": {"verbosity": "low"}, "user": "ann"}, RESPONSES)
    assert [item["type"] for item in json.loads(answer.body)["output"]] == ["message"]
    assert prompt_of(worker).endswith("<think>\n\n</think>\n\n")
    assert answer.headers["blockyard-ignored"] == "text.verbosity, user"


async def test_a_stream_that_breaks_says_so_in_both_of_openais_ways(
    gateway: Gateway, worker: FakeWorker
) -> None:
    worker.script = lambda submit: Script(fail_after=4)
    *before, error, failed = await events_of(gateway)
    assert told(before)[0]["text"], "what came before is told"
    assert (error["type"], error["code"]) == ("error", "engine_failed")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["id"] == before[0]["response"]["id"]


async def test_paths_below_a_response_are_no_others(gateway: Gateway, worker: FakeWorker) -> None:
    for path in (f"{RESPONSES}/", f"{RESPONSES}/resp_1/cancel", f"{RESPONSES}/a/b/input_items"):
        assert (await gateway.get(path)).status == 404


async def test_fields_of_ours_mean_what_they_mean_in_a_chat(gateway: Gateway, worker: FakeWorker) -> None:
    says(worker, "Hello.")
    ours = {"top_k": 7, "seed": 3, "regex": "[a-z]+", "session_id": "s", "stop": ["x"]}
    answer = await gateway.post({"model": "demo", "input": "x", "max_output_tokens": 9, **ours}, RESPONSES)
    assert answer.status == 200, answer.body
    sampling = worker.submits[-1].sampling
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (7, 3, 9)
    assert sampling.structured_output.regex == "[a-z]+"


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
