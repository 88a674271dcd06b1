"""Refused requests: what a field's own type cannot say is refused by the name in the body, and reaches no worker.

Types and bounds of single fields are those of the API's document (test_document.py).
"""

import asyncio
import json
import logging
from typing import Any

import openai
import pytest
from blockyard.proto.v1 import session_pb2
from openai import AsyncOpenAI

from .rig import (
    ADD,
    CHAT,
    COMPLETIONS,
    FLAT_WEATHER,
    HELLO,
    RESPONSES,
    WEATHER,
    FakeWorker,
    Gateway,
    Script,
    is_idle,
    until,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 4},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    TOKENIZE: {"messages": HELLO},
    DETOKENIZE: {"tokens": [1]},
}
DEEP: Any = json.loads('{"items":' * 200 + "{}" + "}" * 200)
CALLED = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
ANSWERED = {"role": "tool", "tool_call_id": "call_2", "content": "x"}
BEGUN = [*HELLO, {"role": "assistant", "content": "Hi the"}]


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


def then(*messages: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, *messages]}


def earlier(**changes: Any) -> dict[str, Any]:
    return then({**CALLS, "tool_calls": [{**CALLED, **changes}]})


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def vllm(**structures: Any) -> dict[str, Any]:
    return {"structured_outputs": structures}


def named(**fields: Any) -> dict[str, Any]:
    return {"tools": [WEATHER, ADD], **fields}


def output(call_id: str) -> dict[str, Any]:
    return {"input": [{"type": "function_call_output", "call_id": call_id, "output": "y"}]}


def form(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": fields}}


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    CHAT: [
        (earlier(function=None), "messages[1].tool_calls[0].function"),
        (earlier(function={"name": "f", "arguments": {}}), "messages[1].tool_calls[0].function.arguments"),
        (earlier(id=7), "messages[1].tool_calls[0].id"),
        (then({"role": "tool", "content": "x"}), "messages[1].tool_call_id"),
        (then(ANSWERED), "messages[1].tool_call_id"),
        (then(CALLS, ANSWERED), "messages[2].tool_call_id"),
        (then({"role": "assistant", "content": None}), "messages[1].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.role"),
        (said([{"type": "text", "text": "x", "txet": "y"}]), "messages[0].content[0]"),
        (said(7), "messages[0].content"),
        (said("\ud800"), "messages[0].content"),
        (said("x", name=7), "messages[0].name"),
        (said("x", name="x" * 300), "messages.name"),
        (
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"a": "b" * 20_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"n": 17}, "n"),
        ({"stream_options": {"continuous": True}, "stream": True}, "stream_options.continuous"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"guided_choice": ["a"], "regex": "a"}, "regex"),
        ({"guided_choice": ["*" * 5000]}, "guided_choice"),
        ({"guided_regex": "a" * 8193}, "guided_regex"),
        *(({name: DEEP}, name) for name in ("json_schema", "guided_json")),
        (vllm(jsn={}), "structured_outputs.jsn"),
        (vllm(json={}, regex="a"), "structured_outputs"),
        (vllm(json=DEEP), "structured_outputs"),
        (vllm(choice=[1]), "structured_outputs.choice"),
        ({"nobody knows": 1}, "(a field)"),
        ({"tool_choice": "required"}, "tool_choice"),
        (named(tool_choice="always"), "tool_choice"),
        (
            named(tool_choice={"type": "function", "function": {"name": "remove"}}),
            "tool_choice.function.name",
        ),
        (named(tool_choice={"type": "allowed_tools"}), "tool_choice"),
        (named(regex="a+"), "tools"),
        (named(tools=[ADD, ADD]), "tools"),
        (named(tools=[ADD] * 129), "tools"),
        (named(tools=[{"type": "function"}]), "tools[0].function"),
        (named(tools=[{"type": "retrieval"}]), "tools[0].type"),
        *((tool(name=name), "tools[0].function.name") for name in ("two words", "x" * 65, 7)),
        (tool(parameters=[]), "tools[0].function.parameters"),
        (tool(strict="yes"), "tools[0].function.strict"),
        (tool(more=1), "tools[0].function.more"),
        (tool(description="\ud800"), "tools[0].function.description"),
        (tool(description="x" * 300_000), "tools"),
        (tool(parameters=DEEP), "tools"),
        ({"prefetch": True, "n": 2}, "n"),
        ({"prefetch": True, "beam_width": 2}, "beam_width"),
        ({"prefetch": True, "logprobs": True}, "logprobs"),
    ],
    COMPLETIONS: [
        ({"echo": True, "logprobs": 1, "n": 2}, "n"),
        ({"echo": True, "logprobs": 25}, "logprobs"),
        ({"echo": True, "logprobs": 1, "beam_width": 2}, "logprobs"),
        ({"echo": True, "prefetch": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"messages": HELLO}, "messages"),
    ],
    RESPONSES: [
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [FLAT_WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"input": None}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (output("x"), "input[0].call_id"),
        (form(type="json_schema", name="x"), "text.format.schema"),
        (form(type="xml"), "text.format.type"),
        (form(type="json_object") | {"regex": "a"}, "regex"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "short"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": 1}}, "reasoning.generate_summary"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
    TOKENIZE: [
        ({"messages": None}, "prompt"),
        ({"prompt": "x"}, "prompt"),
        ({"tools": [{}]}, "tools[0].type"),
    ],
    DETOKENIZE: [
        ({"tokens": [4096]}, "tokens"),
        ({"tokens": [1] * 2049}, "tokens"),
        ({"tokens": None}, "tokens"),
    ],
}
UNSUPPORTED: dict[str, list[tuple[dict[str, Any], str]]] = {
    CHAT: [
        (said([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].image_url"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        (named(reasoning_effort="high"), "reasoning_effort"),
        (vllm(grammar="x"), "structured_outputs.grammar"),
        (vllm(structural_tag="x"), "structured_outputs.structural_tag"),
        (vllm(json={}, disable_any_whitespace=True), "structured_outputs.disable_any_whitespace"),
    ],
    RESPONSES: [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].input_image",
        ),
    ],
    TOKENIZE: [({"messages": None, "prompt": "x", "add_special_tokens": False}, "add_special_tokens")],
}
ROWS = [
    pytest.param(path, fields, param, code, id=f"{path}-{param}")
    for table, code in ((REFUSED, "invalid_request"), (UNSUPPORTED, "unsupported"))
    for path, rows in table.items()
    for fields, param in rows
]
ROWS += [
    pytest.param(CHAT, said("x " * 3000), "messages", "context_length_exceeded"),
    pytest.param(TOKENIZE, {"add_special_tokens": True}, "add_special_tokens", "unsupported"),
    pytest.param(TOKENIZE, said("x" * 200_000), "messages", "context_length_exceeded"),
    pytest.param(TOKENIZE, {"messages": None, "prompt": "x" * 200_000}, "prompt", "context_length_exceeded"),
]


@pytest.mark.parametrize(("path", "fields", "param", "code"), ROWS)
async def test_what_cannot_be_done_is_refused_by_its_name_in_the_body(
    gateway: Gateway, worker: FakeWorker, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    for stream in ({}, {"stream": True}) if path.startswith("/v1") else ({},):
        answer = await gateway.post({**BASES[path], **stream, **fields}, path)
        error = answer.error
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error"), error
        assert (answer.status, answer.headers["x-should-retry"]) == (400, "false")
        assert answer.headers["x-request-id"]
    assert worker.submits == []
    await until(lambda: worker.num_running == 0)


async def test_options_of_a_stream_are_for_streams(gateway: Gateway) -> None:
    answer = await gateway.post({"messages": HELLO, "stream_options": {"include_usage": True}})
    assert (answer.status, answer.error["param"]) == (400, "stream_options")


async def test_what_asks_for_nothing_is_taken(gateway: Gateway, worker: FakeWorker) -> None:
    nothing = {"tools": [], "tool_choice": "none", "store": False, "service_tier": "auto", "audio": None}
    answer = await gateway.post({"messages": HELLO, "max_tokens": 2, "temperature": None, **nothing})
    assert answer.status == 200
    answer = await gateway.post(
        {"prompt": "x", "n": 2, "best_of": 2, "echo": False, "suffix": None}, COMPLETIONS
    )
    assert answer.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_hints_are_ignored_and_named_in_a_header(
    client: AsyncOpenAI, worker: FakeWorker, stream: bool
) -> None:
    hints: dict[str, Any] = {
        "metadata": {"team": "search"},
        "prediction": {"type": "content", "content": "hello"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "somebody",
        "service_tier": "flex",
        "store": True,
        "user": "somebody",
        "verbosity": "low",
    }
    create = client.chat.completions.with_raw_response.create
    hinted = await create(model="demo", messages=HELLO, max_tokens=2, stream=stream, **hints)
    assert hinted.headers["blockyard-ignored"] == ", ".join(hints)
    plain = await create(model="demo", messages=HELLO, max_tokens=2, stream=stream)
    assert "blockyard-ignored" not in plain.headers
    one, other = worker.submits
    assert one.token_ids == other.token_ids


async def test_top_k_of_minus_one_keeps_all_tokens(gateway: Gateway, worker: FakeWorker) -> None:
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        assert (await gateway.post({**prompt, "max_tokens": 1, "top_k": -1}, path)).status == 200
    assert [submit.sampling.top_k for submit in worker.submits] == [0, 0]


async def test_openais_client_raises_its_own_errors(client: AsyncOpenAI, worker: FakeWorker) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="demo", messages=HELLO, temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_request")
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt-99", messages=HELLO, stream=True)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")


async def test_an_unknown_model_is_told_by_its_name_on_every_route(
    gateway: Gateway, worker: FakeWorker
) -> None:
    """Also where the name is that of a field, which other messages rename."""
    for model in ("gpt-99", "Qwen/Qwen3-0.6B", "max_tokens"):
        told = f"The model `{model}` does not exist. Served here: `demo`."
        answers = [
            await gateway.post({"model": model, "messages": HELLO, "max_completion_tokens": 1}),
            await gateway.post({"model": model, "prompt": "x"}, COMPLETIONS),
            await gateway.post({"model": model, "prompt": "x"}, "/tokenize"),
            await gateway.post({"model": model, "tokens": [1]}, "/detokenize"),
            await gateway.get(f"/v1/models/{model}"),
        ]
        assert {(answer.status, answer.error["message"]) for answer in answers} == {(404, told)}
        assert {(answer.error["param"], answer.error["code"]) for answer in answers} == {
            ("model", "model_not_found")
        }
    strange = await gateway.get("/v1/models/%1b%5b31m")
    assert strange.error["message"] == "The model asked for does not exist. Served here: `demo`."


async def test_paths_and_verbs_that_there_are_not(gateway: Gateway) -> None:
    assert (await gateway.get("/v1/moderations")).status == 404
    assert (await gateway.get("/v1")).error["code"] == "route_not_found"
    wrong = await gateway.get(CHAT)
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert (await gateway.get("/health", verb="DELETE")).status == 405


async def test_ids_of_requests_are_the_clients_and_used_once_at_a_time(
    gateway: Gateway, worker: FakeWorker
) -> None:
    worker.script = lambda submit: Script(step_seconds=60.0)
    async with gateway.client() as client:
        waiting = client.chat.completions.create(
            model="demo", messages=HELLO, extra_headers={"X-Request-Id": "twice"}
        )
        task = asyncio.create_task(waiting)
        await until(lambda: worker.submits)
        again = await gateway.post({"messages": HELLO}, X_Request_Id="twice")
        assert (again.status, again.error["code"]) == (409, "request_already_runs")
        assert again.error["param"] == "X-Request-Id"
        assert again.error["message"] == "X-Request-Id: a request of this id is running"
        bad = await gateway.post({"messages": HELLO}, X_Request_Id="two words")
        assert (bad.status, bad.error["param"]) == (400, "X-Request-Id")
        assert bad.headers["x-request-id"] != "two words"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: is_idle(gateway.router))


async def test_what_a_worker_refuses_before_the_first_token_has_its_own_status(gateway: Gateway) -> None:
    grammar = session_pb2.REJECT_REASON_GRAMMAR
    picky = worker_of_model(
        "a", script=lambda submit: Script(reject=grammar, reject_detail="no such grammar")
    )
    async with gateway.router.workers(picky):
        for stream in (False, True):
            answer = await gateway.post({"messages": HELLO, "regex": "(", "stream": stream})
            assert (answer.status, answer.error["param"]) == (400, "regex"), answer.error


async def test_what_leaves_no_token_to_choose_is_named_as_the_body_names_it(gateway: Gateway) -> None:
    no_choice = session_pb2.REJECT_REASON_NO_CHOICE
    picky = worker_of_model("a", script=lambda submit: Script(reject=no_choice))
    async with gateway.router.workers(picky):
        for fields in ({"guided_regex": "a"}, {"response_format": {"type": "json_object"}}):
            answer = await gateway.post({"messages": HELLO, **fields})
            (name,) = fields
            assert (answer.status, answer.error["param"]) == (400, name)
            assert (
                answer.error["message"]
                == f"{name}: leaves no token to choose, together with the lists of tokens"
            )


async def test_other_fields_are_told_by_the_names_that_the_body_has(gateway: Gateway) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = await gateway.post({"messages": HELLO, name: 4, "min_tokens": 5})
        assert answer.error["message"] == f"min_tokens: must be at most {name}"


async def test_a_failure_within_a_stream_is_an_event(gateway: Gateway) -> None:
    failing = worker_of_model("a", script=lambda submit: Script(fail_after=3))
    async with gateway.router.workers(failing), gateway.client() as client:
        stream = await client.chat.completions.create(model="demo", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "engine_failed"


async def test_a_deadline_ends_a_call_with_504(
    gateway: Gateway, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.script = lambda submit: Script(step_seconds=60.0)
    late = await gateway.post({"messages": HELLO}, blockyard_timeout_seconds="0.3")
    assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
    assert late.headers["x-should-retry"] == "false"
    with caplog.at_level(logging.INFO):
        several = {"prompt": ["a", "b"]}
        late = await gateway.post(several, COMPLETIONS, blockyard_timeout_seconds="0.3")
    assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
    assert "ended: DEADLINE_EXCEEDED" in caplog.text, "also where the prompts have ids of their own"
    for bad in ("soon", "-1", "nan", "inf"):
        answer = await gateway.post({"messages": HELLO}, blockyard_timeout_seconds=bad)
        assert (answer.status, answer.error["param"]) == (400, "blockyard-timeout-seconds")
