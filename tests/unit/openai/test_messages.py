"""Anthropic's Messages API with its own client: what the worker is asked, and what the answer becomes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from anthropic.types import RawMessageStreamEvent
from blockyard.proto.text import load_tokenizer
from pydantic import TypeAdapter

from .rig import (
    ARGUMENTS,
    CALL,
    CLAUDES_ADD,
    CLAUDES_WEATHER,
    HELLO,
    MODEL,
    TEMPLATE,
    TEXT,
    TOOL_RESULT,
    TOOL_USE,
    FakeWorker,
    Gateway,
    Script,
    Tokens,
    expected_text,
    prompt_of,
    running_gateway,
    says,
    turns,
    until,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 64}
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest_asyncio.fixture(loop_scope="module")
async def claude(gateway: Gateway) -> AsyncIterator[AsyncAnthropic]:
    async with gateway.claude() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking() -> AsyncIterator[Gateway]:
    """A gateway whose chat template begins the reasoning."""
    async with running_gateway(chat_template=TEMPLATE) as running:
        yield running


async def both(client: AsyncAnthropic, **asked: Any) -> anthropic.types.Message:
    """Return the whole answer, after the streamed one was the same but for ids."""
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert plain(streamed) == plain(whole)
    return whole


def plain(message: Any) -> dict[str, Any]:
    told: dict[str, Any] = message.to_dict()
    told.pop("stop_details", None)
    for block in told["content"]:
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    assert told.pop("id").startswith("msg_")
    return told


async def test_hints_of_agents_reach_the_worker(claude: AsyncAnthropic, worker: FakeWorker) -> None:
    hints = {"session_id": "agent-7", "expected_pause_seconds": 45.0}
    await claude.messages.create(**ASKED, extra_body=hints)
    assert worker.submits[-1].expected_pause_seconds == 45
    ahead = await both(claude, **ASKED, extra_body={**hints, "prefetch": True})
    assert (ahead.content, ahead.stop_reason, ahead.usage.output_tokens) == ([], "max_tokens", 0)
    assert worker.submits[-1].sampling.max_tokens == 1


async def test_an_answer_has_text_and_usage(claude: AsyncAnthropic, worker: FakeWorker) -> None:
    answer = await both(
        claude, **{**ASKED, "max_tokens": 16}, system="Be brief.", extra_body={"seed": 3, "temperature": 0.5}
    )
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == expected_text(3, 16)  # type: ignore[union-attr]
    assert (answer.model, answer.role, answer.type) == ("demo", "assistant", "message")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert (answer.usage.output_tokens, answer.usage.cache_read_input_tokens) == (16, 32)
    count = await claude.messages.count_tokens(model="demo", messages=HELLO, system="Be brief.")
    assert answer.usage.input_tokens + 32 == count.input_tokens
    beta = await claude.beta.messages.count_tokens(model="demo", messages=HELLO, system="Be brief.")
    assert beta.input_tokens == count.input_tokens
    assert worker.submits[-1].sampling.temperature == 0.5
    assert "Be brief." in prompt_of(worker)


async def test_each_event_is_one_of_anthropics_types(gateway: Gateway, worker: FakeWorker) -> None:
    says(worker, f"I look.\n{CALL}\n{CALL}")
    answer = await gateway.post({**ASKED, "tools": [CLAUDES_WEATHER], "stream": True}, "/v1/messages")
    events = []
    for block in (await body_of(gateway, {**ASKED, "tools": [CLAUDES_WEATHER], "stream": True})).split(
        "\n\n"
    )[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            EVENTS.validate_python(event, strict=True)
        events.append(event)
    assert answer.headers["content-type"].startswith("text/event-stream")
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[1], kinds[-2:]) == ("message_start", "ping", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1, 2]
    parts = [event for event in events if event.get("delta", {}).get("type") == "input_json_delta"]
    assert len(parts) > 6, "the input comes piece by piece"
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[-2]["usage"]["output_tokens"] > 1


async def body_of(gateway: Gateway, body: dict[str, Any], path: str = "/v1/messages") -> str:
    """Return the whole body of a stream, without the marks of its chunks."""
    raw = json.dumps(body).encode()
    reader, writer = await gateway.connect()
    head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(f"POST {path} HTTP/1.0\r\n{head}".encode() + raw)
    told = (await reader.read()).decode()
    writer.close()
    return told.partition("\r\n\r\n")[2]


async def test_calls_become_blocks_and_the_reason_is_tool_use(
    claude: AsyncAnthropic, worker: FakeWorker
) -> None:
    says(worker, f"I look.\n{CALL}\n{CALL}")
    answer = await both(claude, **ASKED, tools=[CLAUDES_WEATHER, CLAUDES_ADD])
    text, *calls = answer.content
    assert (text.type, text.text) == ("text", "I look.")  # type: ignore[union-attr]
    assert [(call.name, call.input) for call in calls] == [  # type: ignore[union-attr]
        ("get_weather", json.loads(ARGUMENTS))
    ] * 2
    assert len({call.id for call in calls}) == 2  # type: ignore[union-attr]
    assert answer.stop_reason == "tool_use"


async def test_input_that_max_tokens_cuts_is_empty_in_a_whole_answer(
    claude: AsyncAnthropic, worker: FakeWorker
) -> None:
    says(worker, CALL[:58], is_cut=True)
    length = len(load_tokenizer(MODEL).encode(CALL[:58], add_special_tokens=False))
    answer = await claude.messages.create(**{**ASKED, "max_tokens": length}, tools=[CLAUDES_WEATHER])
    assert (answer.stop_reason, answer.content[0].input) == ("max_tokens", {})  # type: ignore[union-attr]


async def test_a_stop_sequence_is_named(claude: AsyncAnthropic, worker: FakeWorker) -> None:
    text = expected_text(3, 40)
    stop = text[20:24]
    answer = await both(claude, **ASKED, stop_sequences=["nowhere", stop], extra_body={"seed": 3})
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]


async def test_thinking_is_a_block_with_a_signature_and_comes_back(thinking: Gateway) -> None:
    async with thinking.router.workers(worker_of_model("a")) as (worker,), thinking.claude() as client:
        says(worker, "Hm.</think>\nYes.")
        asked = {**ASKED, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        answer = await both(client, **asked)
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert (answer.content[0].thinking, answer.content[0].signature) == ("Hm.", "unsigned")  # type: ignore[union-attr]
        assert answer.stop_reason == "end_turn"
        says(worker, "Yes.")
        talk = [*HELLO, {"role": "assistant", "content": answer.content}, *HELLO]
        await client.messages.create(**{**asked, "messages": talk, "thinking": {"type": "disabled"}})
        assert "<think>Hm.</think>Yes.<|im_end|>" in prompt_of(worker)
        assert prompt_of(worker).endswith("<think>\n\n</think>\n\n")


def from_user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"messages": None}, "messages: Field required"),
        ({"n": 2}, "n: Extra inputs are not permitted"),
        ({"thread": {"type": "create"}}, "thread: is not supported"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        (
            {"messages": [{"role": "king", "content": "x"}]},
            "messages.0.role: must be user, assistant or system",
        ),
        ({"messages": [{**HELLO[0], "name": "x"}]}, "messages.0.name: Extra inputs are not permitted"),
        (turns(""), "messages.0: user messages must have non-empty content"),
        (turns("x", "y "), "messages: final assistant content cannot end with trailing whitespace"),
        (turns("\ud800"), "messages.0.content: must be valid Unicode"),
        (from_user({"text": "x"}), "messages.0.content.0.type: Field required"),
        (from_user({"type": "text"}), "messages.0.content.0.text: Field required"),
        (from_user({**TEXT, "text": ""}), "messages.0.content.0.text: text content blocks must be non-empty"),
        ({"messages": [{"role": "assistant", "content": []}]}, "messages: needs a message of another role"),
        (from_user({**TEXT, "bold": True}), "messages.0.content.0.bold: Extra inputs are not permitted"),
        (from_user({"type": "image", "source": {}}), "messages.0.content.0.image: is not supported"),
        (from_user({"type": "document"}), "messages.0.content.0.document: is not supported"),
        (from_user({"type": "poem"}), "messages.0.content.0.type: must be one that user messages may have"),
        (from_user(TOOL_USE), "messages.0.content.0.type: must be one that user messages may have"),
        (
            turns("x", [{"type": "redacted_thinking", "data": "x"}]),
            "messages.1.content.0: redacted_thinking is not",
        ),
        (
            turns("x", [{**TOOL_USE, "input": "x"}], [TOOL_RESULT]),
            "messages.1.content.0.input: must be an object",
        ),
        (
            turns("x", [{**TOOL_USE, "name": "a b"}], [TOOL_RESULT]),
            "messages.1.content.0.name: must have 1 to 64",
        ),
        (turns("x", [TOOL_USE]), "messages.1: `tool_use` ids were found without `tool_result` blocks"),
        (turns("x", [TOOL_USE], "y"), "messages.1: `tool_use` ids were found without `tool_result` blocks"),
        (
            turns("x", [TOOL_USE], [TEXT, TOOL_RESULT]),
            "messages.2.content.1: `tool_result` blocks must come before text",
        ),
        (
            turns([TOOL_RESULT]),
            "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks.",
        ),
        (
            turns("x", [TOOL_USE], [TOOL_RESULT, TOOL_RESULT]),
            "messages.2.content.1: unexpected `tool_use_id` found",
        ),
        (
            turns("x", [TOOL_USE], [{**TOOL_RESULT, "content": [{"type": "image"}]}]),
            "messages.2.content.0.content.0.image: is not supported",
        ),
        ({"system": [{"type": "image"}]}, "system.0.image: is not supported"),
        (
            {"tools": [{"type": "web_search_20260209", "name": "web_search"}]},
            "tools.0.type: only custom tools",
        ),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [{**CLAUDES_WEATHER, "name": "a b"}]}, "tools.0.name: must have 1 to 64"),
        ({"tools": [{**CLAUDES_WEATHER, "defer_loading": True}]}, "tools.0.defer_loading: is not supported"),
        ({"tools": [CLAUDES_WEATHER, CLAUDES_WEATHER]}, "tools: each must have another name"),
        ({"tools": [CLAUDES_WEATHER] * 129}, "tools: at most 128"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: may only be specified while providing `tools`"),
        ({"tools": [CLAUDES_WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name: Field required"),
        (
            {"tools": [CLAUDES_WEATHER], "tool_choice": {"type": "tool", "name": "f"}},
            "tool_choice.name: must be the name",
        ),
        (
            {"tools": [CLAUDES_WEATHER], "tool_choice": {"type": "all"}},
            "tool_choice.type: must be auto, any, tool or none",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: Field required"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            "thinking.budget_tokens: Input should be greater than or equal to 1024",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "max_tokens: must be greater than `thinking.budget_tokens`",
        ),
        ({"thinking": {"type": "much"}}, "thinking.type: must be enabled, disabled or adaptive"),
        ({"output_config": {"effort": "much"}}, "output_config.effort: must be one of"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: must be json_schema"),
        (
            {"regex": "a", "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "regex: excludes output_config.format",
        ),
        (
            {"regex": "a", "tools": [{**CLAUDES_WEATHER, "strict": True}]},
            "tools: excludes a structured output",
        ),
    ],
)
async def test_bad_input_is_refused_under_anthropics_names(
    gateway: Gateway, worker: FakeWorker, fields: dict[str, Any], message: str
) -> None:
    answer = await gateway.post({**ASKED, **fields}, "/v1/messages")
    told = json.loads(answer.body)
    assert answer.status == 400, told
    assert told.keys() == {"type", "error", "request_id"}
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["message"].startswith(message), told
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert worker.submits == []


async def test_count_tokens_takes_what_makes_the_prompt_alone(gateway: Gateway, worker: FakeWorker) -> None:
    asked = {"model": "demo", "messages": HELLO, "tools": [CLAUDES_WEATHER], "thinking": {"type": "adaptive"}}
    answer = await gateway.post(asked, "/v1/messages/count_tokens?beta=true")
    assert json.loads(answer.body).keys() == {"input_tokens"}
    refused = await gateway.post({**asked, "max_tokens": 5}, "/v1/messages/count_tokens")
    assert json.loads(refused.body)["error"]["message"] == "max_tokens: Extra inputs are not permitted"


async def test_errors_have_anthropics_form(gateway: Gateway, worker: FakeWorker) -> None:
    messages = "/v1/messages"
    for path, body, headers, status, kind in (
        (messages, {**ASKED, "model": "claude-x"}, {}, 404, "not_found_error"),
        (messages, b"{", {}, 400, "invalid_request_error"),
        (messages, b" " * 20_000_000, {}, 413, "request_too_large"),
        (messages, ASKED, {"content_type": "text/plain"}, 415, "invalid_request_error"),
        (messages, ASKED, {"x_request_id": "two words"}, 400, "invalid_request_error"),
        (f"{messages}/batches", ASKED, {}, 404, "not_found_error"),
        (f"{messages}/count_tokens", {"messages": []}, {}, 400, "invalid_request_error"),
    ):
        answer = await gateway.post(body, path, **headers)
        told = json.loads(answer.body)
        assert (answer.status, told["type"], told["error"]["type"]) == (status, "error", kind)
        assert told["request_id"] == answer.headers["request-id"]


async def test_only_these_routes_have_anthropics_form(gateway: Gateway) -> None:
    refused = await gateway.post({"messages": []})
    assert refused.error["param"] == "messages"
    assert "request-id" not in refused.headers
    wrong = await gateway.get("/v1/messages")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert json.loads(wrong.body)["error"]["type"] == "invalid_request_error"


async def test_a_prompt_that_is_too_long_is_told_as_clients_look_for_it(
    claude: AsyncAnthropic, worker: FakeWorker
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        await claude.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "x y " * 2000}]})


async def test_a_failure_within_a_stream_is_an_error_event(gateway: Gateway) -> None:
    dying = worker_of_model("a", script=lambda submit: Script(fail_after=4))
    async with gateway.router.workers(dying), gateway.claude() as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")


async def test_an_output_that_fills_the_context_says_so(claude: AsyncAnthropic, worker: FakeWorker) -> None:
    worker.script = lambda submit: Script(tokens_a_step=16)
    answer = await both(claude, **{**ASKED, "max_tokens": 100_000}, extra_body={"seed": 3})
    assert answer.stop_reason == "model_context_window_exceeded"


async def test_a_token_may_be_the_api_key(tokens: Tokens) -> None:
    async with running_gateway(auth_file=str(tokens.path)) as guarded:
        for headers in (
            {},
            {"x_api_key": "wrong"},
            {"x_api_key": tokens.of["ann"], "authorization": "Bearer x"},
        ):
            answer = await guarded.post(ASKED, "/v1/messages", **headers)
            told = json.loads(answer.body)
            assert (answer.status, told["error"]["type"]) == (401, "authentication_error")
            assert told["request_id"] == answer.headers["request-id"]
        forbidden = await guarded.post(ASKED, "/v1/messages", x_api_key=tokens.of["vic"])
        assert (forbidden.status, json.loads(forbidden.body)["error"]["type"]) == (403, "permission_error")
        for options in ({"api_key": tokens.of["ann"]}, {"api_key": None, "auth_token": tokens.of["ann"]}):
            async with guarded.claude(**options) as client:
                assert (await client.messages.count_tokens(model="demo", messages=HELLO)).input_tokens


async def test_a_router_without_room_answers_529_and_when_to_come_back() -> None:
    stuck = worker_of_model("a", script=lambda submit: Script(step_seconds=60.0))
    async with running_gateway(max_requests=1) as tight, tight.router.workers(stuck) as (worker,):
        holding = asyncio.create_task(tight.post(ASKED, "/v1/messages"))
        await until(lambda: worker.started)
        for streams in (False, True):
            refused = await tight.post({**ASKED, "stream": streams}, "/v1/messages")
            assert (refused.status, json.loads(refused.body)["error"]["type"]) == (529, "overloaded_error")
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-should-retry"] == "true"
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


async def test_a_request_like_claude_codes_is_accepted(gateway: Gateway, worker: FakeWorker) -> None:
    """Its fields as its documentation and reports about other gateways tell them. The program itself is not run."""
    cached = {"cache_control": {"type": "ephemeral"}}
    says(worker, CALL)
    billing = "x-anthropic-billing-header: cc_version=2.1.252.1; cc_entrypoint=cli; cch=0;"
    talk = turns(
        [
            {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
            {"type": "text", "text": "How is the weather?", **cached},
        ],
        [{"type": "text", "text": "I look."}, {**TOOL_USE, **cached}],
        [{**TOOL_RESULT, "is_error": False, **cached}],
    )["messages"]
    body = {
        "model": "demo",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent.", **cached},
        ],
        "messages": [*talk, {"role": "system", "content": "The user is away."}],
        "tools": [{**CLAUDES_WEATHER, "eager_input_streaming": True, **cached}],
        "metadata": {"user_id": "user_1_account_2_session_3"},
        "thinking": {"type": "adaptive", "budget_tokens": 0},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    told = await body_of(gateway, body, "/v1/messages?beta=true")
    assert '"stop_reason":"tool_use"' in told
    prompt = prompt_of(worker)
    assert "billing" not in prompt
    assert "<|im_start|>system\nThe user is away.<|im_end|>" in prompt
    assert "</system-reminder>\nHow is the weather?<|im_end|>" in prompt
