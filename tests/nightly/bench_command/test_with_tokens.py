"""`bench` with a token or a key, in a thread, against a router and workers of this process."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.cli import main
from blockyard.router.admission.token_entries import new_token
from click.testing import CliRunner, Result

from tests.unit.router.rig import Router, running_router, worker_of_model

LOAD = ("--num-requests", "6", "--input-tokens", "40", "--output-tokens", "5")


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a token that may only ask the model. The commands find none in their environment."""
    for variable in ("OPENAI_API_KEY", "BLOCKYARD_ROUTER", "BLOCKYARD_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    token, entry = new_token("ann", "user", "acme")
    tokens = tmp_path / "tokens.json"
    tokens.touch(mode=0o600)
    tokens.write_text(json.dumps([entry]))
    return token


@pytest.fixture
async def router(secret: str, tmp_path: Path) -> AsyncIterator[Router]:
    tokens = str(tmp_path / "tokens.json")
    async with running_router(auth_file=tokens, http_port=0) as router, worker_of_model("w0") as worker:
        router.server.set_workers([worker.address])
        yield router


async def run(*words: str, **environment: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, words, env=environment)


async def results(*words: str, **environment: str) -> dict[str, Any]:
    result = await run("bench", *words, "--output", "json", **environment)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    (document["found"],) = document["results"].values()
    return document


async def test_a_token_that_may_only_ask_the_model_measures_what_its_own_requests_tell(
    router: Router, secret: str
) -> None:
    document = await results("random", *LOAD, "--router", router.address, BLOCKYARD_TOKEN=secret)
    found = document["found"]
    assert document["cluster"]["workers"] is None
    assert (found["finished"], found["failed"], found["predicted_hit_rate"]) == (6, {}, None)
    assert found["output_tokens_per_second"] == pytest.approx(6 * 5 / found["seconds"])
    assert found["input_tokens_per_second"] == pytest.approx(6 * 40 / found["seconds"])


async def test_a_server_is_measured_by_its_own_count_with_the_key_of_its_variable(
    router: Router, secret: str
) -> None:
    url = f"http://{router.server.http_address}"
    for endpoint in ("completions", "chat"):
        options = ("--url", url, "--endpoint", endpoint)
        found = (await results("random", *LOAD, *options, OPENAI_API_KEY=secret))["found"]
        assert (found["finished"], found["failed"]) == (6, {})
        assert 0 < found["ttft_ms"]["p50"] <= found["e2el_ms"]["p50"]
    refused = await run("bench", "random", *LOAD, "--url", url, OPENAI_API_KEY="another")
    assert refused.exit_code == 1
    assert refused.output.startswith("Error: ")
