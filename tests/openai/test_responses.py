"""Responses with OpenAI's own client and types: what the worker is asked, and what an output becomes, whole and
streamed."""

import json
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from .rig import FakeWorker, Gateway
from .test_tools import ARGUMENTS, CALL, prompt_of, says

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESPONSES = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def events_of(gateway: Gateway, **asked: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which is what OpenAI's types say."""
    body = {"model": "demo", "input": "hello", **asked, "stream": True}
    found = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{gateway.address}{RESPONSES}", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        for block in (await answer.text()).removesuffix("\n\n").split("\n\n"):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            EVENT.validate_python(event, strict=True)
            found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def told(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output that the events of a stream add up to, item by item."""
    output: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(output)
                output.append({**event["item"], "text": ""})
            case "content_part.added":
                assert event["part"]["text"] == ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["item_id"] == output[event["output_index"]]["id"]
                output[event["output_index"]]["text"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == output[event["output_index"]]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == output[event["output_index"]]["text"]
            case "output_item.done":
                ended = event["item"]
                assert ended["id"] == output[event["output_index"]]["id"]
                text = ended.get("arguments") or "".join(part["text"] for part in ended.get("content", ()))
                assert text == output[event["output_index"]]["text"]
    return output


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
    events = await events_of(gateway, tools=[WEATHER])
    output = told(events)
    assert [(item["type"], item["text"]) for item in output] == [
        ("message", "I look."),
        ("function_call", ARGUMENTS),
        ("function_call", ARGUMENTS),
    ]
    assert len({item["call_id"] for item in output[1:]}) == 2
    answer = await client.responses.create(model="demo", input="hello", tools=[WEATHER])  # type: ignore[list-item]
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert '"name": "get_weather"' in prompt_of(worker)


async def test_an_answer_that_is_cut_is_incomplete(gateway: Gateway, worker: FakeWorker) -> None:
    says(worker, "Hello there.", is_cut=True)
    *_, last = events = await events_of(gateway, max_output_tokens=64)
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-2]["item"]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("background", True, "background"),
        ("conversation", "conv_1", "conversation"),
        ("tools", [{"type": "web_search"}], "tools[0].type"),
        ("tools", [{"type": "function", "name": "a b"}], "tools[0].name"),
        ("tool_choice", {"type": "function", "name": "f"}, "tool_choice.name"),
        ("truncation", "auto", "truncation"),
        ("include", ["message.output_text.logprobs"], "include[0]"),
        ("input", [], "input"),
        ("input", None, "input"),
        ("input", [{"type": "item_reference", "id": "x"}], "input[0].type"),
        (
            "input",
            [{"role": "user", "content": [{"type": "input_image"}]}],
            "input[0].content[0].input_image",
        ),
        ("input", [{"type": "function_call_output", "call_id": "x", "output": "y"}], "input[0].call_id"),
        ("input", [{"role": "tool", "content": "x"}], "input[0].role"),
        ("text", {"format": {"type": "json_schema", "name": "x"}}, "text.format.schema"),
        ("text", {"format": {"type": "xml"}}, "text.format.type"),
        ("reasoning", {"effort": "much"}, "reasoning.effort"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("temperature", -1, "temperature"),
        ("max_tokens", 5, "max_tokens"),
        ("metadata", {"a": 1}, "metadata"),
        ("unheard_of", 1, "unheard_of"),
        ("previous_response_id", "resp_1", "previous_response_id"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_its_name_in_the_body(
    gateway: Gateway, worker: FakeWorker, field: str, value: Any, param: str
) -> None:
    answer = await gateway.post({"model": "demo", "input": "hello", field: value}, RESPONSES)
    assert answer.status == 400
    assert answer.error["param"] == param, answer.error
    assert answer.error["type"] == "invalid_request_error"
