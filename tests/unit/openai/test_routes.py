"""Routes of the port beside generation: tokens, version, metrics, and calls of web pages that the operator names."""

import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from blockyard.proto.text import load_tokenizer
from blockyard.router.config import checked_origins
from prometheus_client.parser import text_string_to_metric_families

from .rig import CHAT, HELLO, MODEL, Gateway, Tokens, running_gateway, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = "https://chat.example"
QUESTION = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-stainless-os",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tokens: Tokens) -> AsyncIterator[Gateway]:
    async with running_gateway(
        auth_file=str(tokens.path), cors_origins=(PAGE, "http://127.0.0.1:3000"), metrics_names="vllm"
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "def f(x):", "add_special_tokens": True}, "def f(x):"),
        ({"model": "demo", "prompt": "<|im_end|>"}, "<|im_end|>"),
        ({"messages": HELLO}, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
        ({"messages": HELLO, "add_generation_prompt": False}, "<|im_start|>user\nhello<|im_end|>\n"),
    ],
)
async def test_tokens_go_there_and_back_as_in_vllm(gateway: Gateway, body: dict[str, Any], text: str) -> None:
    answer = json.loads((await gateway.post({**body, "return_token_strs": True}, "/tokenize")).body)
    tokenizer = load_tokenizer(MODEL)
    assert answer.keys() == {"count", "max_model_len", "tokens", "token_strs"}
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 2048)
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
    back = await gateway.post({"tokens": answer["tokens"]}, "/detokenize")
    assert json.loads(back.body) == {"prompt": text}
    plain = json.loads((await gateway.post(body, "/tokenize")).body)
    assert (plain["tokens"], plain["token_strs"]) == (answer["tokens"], None)


async def test_version_and_models_say_since_when(gateway: Gateway) -> None:
    version = json.loads((await gateway.get("/version")).body)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", version["version"])
    (model,) = json.loads((await gateway.get("/v1/models")).body)["data"]
    assert 0 <= time.time() - model["created"] < 3600


async def test_metrics_are_the_routers_as_prometheus_reads_them(gateway: Gateway) -> None:
    async def family(name: str) -> Any:
        answer = await gateway.get("/metrics")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain")
        found = {one.name: one for one in text_string_to_metric_families(answer.body.decode())}
        return found.get(name)

    async def is_read() -> bool:
        return await family("blockyard_requests") is not None

    await until(is_read)
    before = sum(sample.value for sample in (await family("blockyard_requests")).samples)
    await gateway.post({"messages": HELLO, "n": 99})

    async def has_grown() -> bool:
        return sum(sample.value for sample in (await family("blockyard_requests")).samples) == before + 1

    await until(has_grown)


async def test_these_paths_need_the_roles_of_grpcs_methods(guarded: Gateway, tokens: Tokens) -> None:
    async def status(name: str, path: str) -> int:
        bearer = f"Bearer {tokens.of[name]}"
        if path in ("/tokenize", "/detokenize"):
            body = {"prompt": "x"} if path == "/tokenize" else {"tokens": [1]}
            return (await guarded.post(body, path, authorization=bearer)).status
        return (await guarded.get(path, authorization=bearer)).status

    for path, users, viewers in (
        ("/tokenize", 200, 403),
        ("/detokenize", 200, 403),
        ("/version", 200, 403),
        ("/metrics", 403, 200),
    ):
        assert (await guarded.get(path)).status == 401
        assert [await status(name, path) for name in ("ann", "vic", "ada")] == [users, viewers, 200], path


async def test_metrics_have_vllms_names_too_where_the_operator_wants_them(
    guarded: Gateway, tokens: Tokens
) -> None:
    async def names() -> set[str]:
        answer = await guarded.get("/metrics", authorization=f"Bearer {tokens.of['vic']}")
        return {family.name for family in text_string_to_metric_families(answer.body.decode())}

    async def is_read() -> bool:
        return bool(await names())

    await until(is_read)
    assert {"vllm:num_requests_running", "blockyard_router_running"} <= await names()


async def test_a_named_page_may_call_and_reads_every_answer(guarded: Gateway) -> None:
    yes = await guarded.get(CHAT, "OPTIONS", origin=PAGE, **QUESTION)
    assert (yes.status, yes.body) == (204, b"")
    assert yes.headers["access-control-allow-origin"] == PAGE
    assert yes.headers["access-control-allow-headers"] == QUESTION["access-control-request-headers"]
    assert "POST" in yes.headers["access-control-allow-methods"]
    refused = await guarded.get("/v1/models", origin=PAGE)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    assert "X-Request-Id" in refused.headers["access-control-expose-headers"]
    assert refused.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in yes.headers


@pytest.mark.parametrize(
    "origin",
    [
        "https://chat.example.evil",
        "http://chat.example",
        "https://chat.example:8443",
        "null",
        "*",
        "https://CHAT.example",
    ],
)
async def test_no_other_page_may(guarded: Gateway, origin: str) -> None:
    answer = await guarded.get(CHAT, "OPTIONS", origin=origin, **QUESTION)
    assert answer.status == 401, "as for anybody without a token"
    answer = await guarded.get("/health", origin=origin)
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["vary"] == "Origin"


async def test_odd_questions_get_no_header_of_theirs_back(guarded: Gateway) -> None:
    odd = {**QUESTION, "access-control-request-headers": "x;y, <script>"}
    assert (
        "access-control-allow-headers" not in (await guarded.get(CHAT, "OPTIONS", origin=PAGE, **odd)).headers
    )
    assert (await guarded.get(CHAT, "OPTIONS", origin=PAGE)).status == 401, "no question: no method was named"


async def test_without_the_option_no_page_may(gateway: Gateway) -> None:
    answer = await gateway.get(CHAT, "OPTIONS", origin=PAGE, **QUESTION)
    assert answer.status == 405
    assert not {name for name in answer.headers if name.startswith("access-control") or name == "vary"}


@pytest.mark.parametrize(
    "origin", ["*", "null", "chat.example", "https://chat.example/", "https://a b", "https://A.example"]
)
async def test_an_origin_that_is_none_is_refused_at_the_start(origin: str) -> None:
    assert checked_origins([PAGE, "http://[::1]:3000"]) == (PAGE, "http://[::1]:3000")
    with pytest.raises(ValueError, match="an origin is like"):
        checked_origins([PAGE, origin])
