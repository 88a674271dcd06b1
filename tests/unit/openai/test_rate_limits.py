"""Limits of a token and a tenant over HTTP and gRPC: refusals give a retry time, headers give what is left."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest_asyncio
from blockyard.proto.v1 import inference_pb2
from blockyard.router.admission.rate_limits import RateLimit
from blockyard.router.admission.token_entries import new_token

from tests.unit.router.rig import reason_of, refused, request

from .rig import COMPLETIONS, Answer, FakeWorker, Gateway, running_gateway, served_by, until, worker_of_model

SHORT: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 7, "ignore_eos": True}


class Keys:
    """Tokens by name: one without limits, one of few requests, one of few tokens, and two of a limited tenant."""

    def __init__(self, folder: Path) -> None:
        limits = {
            "free": RateLimit(),
            "few": RateLimit(requests_per_minute=2),
            "short": RateLimit(tokens_per_minute=1000),
            "a": RateLimit(),
            "b": RateLimit(requests_per_minute=50),
        }
        self.of: dict[str, str] = {}
        entries = []
        for name, limit in limits.items():
            tenant = "acme" if name in "ab" else None
            self.of[name], entry = new_token(name, "user", tenant, limit=limit)
            entries.append(entry)
        self.path = folder / "tokens.json"
        self.path.touch(mode=0o600)
        tenants = {"acme": {"requests_per_minute": 3}}
        self.path.write_text(json.dumps({"tokens": entries, "tenants": tenants}))


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[Gateway, Keys, FakeWorker]]:
    keys = Keys(tmp_path)
    async with (
        running_gateway(auth_file=str(keys.path)) as gateway,
        served_by(gateway, worker_of_model("w")) as worker,
    ):
        yield gateway, keys, worker


async def ask(gateway: Gateway, keys: Keys, name: str, **fields: Any) -> Answer:
    return await gateway.post({**SHORT, **fields}, COMPLETIONS, authorization=f"Bearer {keys.of[name]}")


def left(answer: Answer) -> dict[str, str]:
    return {
        name.removeprefix("x-ratelimit-"): value
        for name, value in answer.headers.items()
        if name.startswith("x-ratelimit-")
    }


async def test_requests_beyond_the_limit_are_refused_until_they_may_come_back(
    running: tuple[Gateway, Keys, FakeWorker],
) -> None:
    gateway, keys, worker = running
    assert left(await ask(gateway, keys, "free")) == {}
    first = await ask(gateway, keys, "few")
    assert first.status == 200
    assert left(first)["limit-requests"] == "2"
    assert left(first)["remaining-requests"] == "1"
    assert 0 < float(left(first)["reset-requests"].removesuffix("s")) <= 30
    assert (await ask(gateway, keys, "few")).status == 200
    num_submits = len(worker.submits)
    beyond = await ask(gateway, keys, "few")
    assert (beyond.status, beyond.error["code"], beyond.error["type"]) == (
        429,
        "rate_limited",
        "rate_limit_error",
    )
    assert "this token may have 2 requests a minute" in beyond.error["message"]
    assert 1 <= int(beyond.headers["retry-after"]) <= 30
    assert beyond.headers["x-should-retry"] == "true"
    assert left(beyond)["remaining-requests"] == "0"
    metadata = (("authorization", f"Bearer {keys.of['few']}"),)
    error = await refused(gateway.router.inference.Generate(request(), metadata=metadata))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    tokenize = inference_pb2.TokenizeRequest(prompt="x")
    error = await refused(gateway.router.inference.Tokenize(tokenize, metadata=metadata))
    assert reason_of(error) == "RATE_LIMITED"
    assert len(worker.submits) == num_submits
    assert (await ask(gateway, keys, "free")).status == 200


async def test_tokens_are_charged_as_asked_for_and_corrected_by_what_was_used(
    running: tuple[Gateway, Keys, FakeWorker],
) -> None:
    gateway, keys, _ = running
    answer = await ask(gateway, keys, "short", n=2)
    assert left(answer)["limit-tokens"] == "1000"
    assert answer.status == 200
    await until(lambda: is_idle_of(gateway))
    # A prompt of 3 tokens and twice 7: what fills in meanwhile is some 17 a second.
    beyond = await ask(gateway, keys, "short", max_tokens=500, n=2)
    assert beyond.status == 429
    assert "this token may have 1000 tokens a minute" in beyond.error["message"]
    assert int(left(beyond)["remaining-tokens"]) >= 983
    assert float(beyond.headers["retry-after-ms"]) <= 2000


def is_idle_of(gateway: Gateway) -> bool:
    return gateway.router.server.readings.get("requests_admitted") == 0


async def test_the_tokens_of_a_tenant_share_its_limit(running: tuple[Gateway, Keys, FakeWorker]) -> None:
    gateway, keys, _ = running
    statuses = [(await ask(gateway, keys, name)).status for name in ("a", "b", "a", "b")]
    assert statuses == [200, 200, 200, 429]
    beyond = await ask(gateway, keys, "b")
    assert "this tenant may have 3 requests a minute" in beyond.error["message"]
    assert left(beyond)["limit-requests"] == "3"
