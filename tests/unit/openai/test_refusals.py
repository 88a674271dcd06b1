"""Refused requests: each field by name, and the error in OpenAI's client. No refused request reaches a worker."""

import asyncio
import logging
from typing import Any

import openai
import pytest
from blockyard.proto.v1 import session_pb2
from openai import AsyncOpenAI

from .rig import CHAT, COMPLETIONS, HELLO, FakeWorker, Gateway, Script, is_idle, until, worker_of_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
PART_WITH_MORE = [{"role": "user", "content": [{"type": "text", "text": "x", "txet": "y"}]}]
CALLED = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "unsupported"),
        ({"echo": True}, "echo", "unsupported"),
        ({"functions": [{}]}, "functions", "unsupported"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_request"),
        ({"modalities": ["audio"]}, "modalities", "unsupported"),
        ({"audio": {"voice": "x"}}, "audio", "unsupported"),
        ({"web_search_options": {}}, "web_search_options", "unsupported"),
        ({"store": "yes"}, "store", "invalid_request"),
        ({"metadata": [1]}, "metadata", "invalid_request"),
        ({"top_k": -2}, "top_k", "invalid_request"),
        (
            {"stream_options": {"continuous": True}, "stream": True},
            "stream_options.continuous",
            "invalid_request",
        ),
        ({"messages": IMAGE}, "messages[0].content[0].image_url", "unsupported"),
        ({"messages": CALLED}, "messages[1].tool_calls[0].function", "invalid_request"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "invalid_request"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "unsupported"),
        ({"messages": PART_WITH_MORE}, "messages[0].content[0]", "invalid_request"),
        ({"messages": []}, "messages", "invalid_request"),
        ({"messages": "hello"}, "messages", "invalid_request"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.role", "invalid_request"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "invalid_request"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "invalid_request"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, "messages", "context_length_exceeded"),
        ({"temperature": -1}, "temperature", "invalid_request"),
        ({"temperature": "warm"}, "temperature", "invalid_request"),
        ({"temperature": 10**400}, "temperature", "invalid_request"),
        ({"n": 17}, "n", "invalid_request"),
        ({"n": 0}, "n", "invalid_request"),
        ({"n": 1.5}, "n", "invalid_request"),
        ({"n": True}, "n", "invalid_request"),
        ({"seed": 2**63}, "seed", "invalid_request"),
        ({"max_tokens": 0}, "max_tokens", "invalid_request"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "invalid_request"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_request"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_request"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_request"),
        ({"logprobs": 3}, "logprobs", "invalid_request"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_request"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias", "invalid_request"),
        ({"stop": [""]}, "stop", "invalid_request"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids", "invalid_request"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_request"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format", "invalid_request"),
        ({"json_schema": DEEP}, "json_schema", "invalid_request"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "unsupported"),
        ({"return_token_ids": 1}, "return_token_ids", "invalid_request"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens", "invalid_request"),
        ({"bad_words": ["x"] * 65}, "bad_words", "invalid_request"),
        ({"guided_json": DEEP}, "guided_json", "invalid_request"),
        ({"guided_json": 7}, "guided_json", "invalid_request"),
        ({"guided_regex": "a" * 8193}, "guided_regex", "invalid_request"),
        ({"guided_choice": "yes"}, "guided_choice", "invalid_request"),
        ({"guided_choice": []}, "guided_choice", "invalid_request"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "invalid_request"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", "invalid_request"),
        ({"guided_choice": ["*" * 5000]}, "guided_choice", "invalid_request"),
        ({"guided_choice": ["a"], "regex": "a"}, "regex", "invalid_request"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "unsupported"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "unsupported"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unsupported"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "unsupported",
        ),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "invalid_request"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_request"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "invalid_request"),
        ({"structured_outputs": {"json": DEEP}}, "structured_outputs", "invalid_request"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "invalid_request"),
        ({"stream_options": "yes"}, "stream_options", "invalid_request"),
        ({"stream": "yes"}, "stream", "invalid_request"),
        ({"temprature": 1}, "temprature", "invalid_request"),
        ({"nobody knows": 1}, "(a field)", "invalid_request"),
        ({"session_id": "two words"}, "session_id", "invalid_request"),
        ({"cache_salt": "snow\u2603man"}, "cache_salt", "invalid_request"),
    ],
)
async def test_a_bad_field_is_answered_400_by_its_name(
    gateway: Gateway, worker: FakeWorker, fields: dict[str, Any], param: str, code: str
) -> None:
    for stream in ({}, {"stream": True}):
        answer = await gateway.post({"messages": HELLO, "max_tokens": 4, **stream, **fields})
        error = answer.error
        assert (answer.status, error["type"]) == (400, "invalid_request_error")
        assert (error["param"], error["code"]) == (param, code), error
        assert answer.headers["x-should-retry"] == "false"
        assert answer.headers["x-request-id"]
    assert worker.submits == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "echo": 1}, "echo"),
        ({"prompt": "x", "echo": True, "logprobs": 1, "n": 2}, "n"),
        ({"prompt": "x", "echo": True, "logprobs": 25}, "logprobs"),
        ({"prompt": "x", "echo": True, "logprobs": 1, "beam_width": 2}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "messages": HELLO}, "messages"),
    ],
)
async def test_the_same_for_completions(
    gateway: Gateway, worker: FakeWorker, fields: dict[str, Any], param: str
) -> None:
    answer = await gateway.post(fields, COMPLETIONS)
    assert (answer.status, answer.error["param"]) == (400, param), answer.error
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
