"""Lines of batches for each route, and for each of several models."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
from blockyard.proto.text import load_tokenizer
from blockyard.router.config import ServedModel
from blockyard.router.openai.batches import runner
from blockyard.router.openai.batches.lines import num_inputs
from openai import AsyncOpenAI

from tests.unit.router.fake_worker import FakeWorker, expected_embedding
from tests.unit.router.test_models import OTHER, served

from .rig import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    HELLO,
    MODEL,
    RESPONSES,
    SIZE,
    Gateway,
    answers,
    embedding_folder,
    ended,
    jsonl,
    started,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXTS = ["import os", "import sys"]
House = tuple[AsyncOpenAI, dict[str, FakeWorker]]


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """A client of a router with two models that generate and one that embeds."""
    folder = tmp_path_factory.mktemp("house")
    model = str(embedding_folder(folder / "model"))
    embedder = ServedModel(model=model, names=("embedder",), index="embedder")
    async with AsyncExitStack() as stack:
        router, workers = await stack.enter_async_context(
            served(OTHER, embedder, batch_dir=str(folder / "batches"), max_requests=64)
        )
        yield await stack.enter_async_context(Gateway(router=router).client()), workers


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 3}),
        (COMPLETIONS, {"prompt": "def f(", "max_tokens": 3}),
        (RESPONSES, {"input": "hello", "max_output_tokens": 3}),
    ],
)
async def test_lines_of_one_batch_go_to_the_workers_of_the_models_that_they_name(
    house: House, url: str, body: dict[str, Any]
) -> None:
    client, workers = house
    before = {name: len(worker.submits) for name, worker in workers.items()}
    named = {"d": "demo", "o": "other", "a": "alias", "x": "nothing", "e": "embedder"}
    lines = [line(name, url, model=model, **body) for name, model in named.items()]
    lines.append(line("s", url, model="demo", stream=True, **body))
    done = await ended(client, await started(client, jsonl(*lines), url))
    found = await answers(client, done.output_file_id)
    models = {name: one["response"]["body"]["model"] for name, one in found.items()}
    assert models == {"d": "demo", "o": "other", "a": "other"}, "an answer has the model's id"
    errors = await answers(client, done.error_file_id)
    statuses = {name: one["response"]["status_code"] for name, one in errors.items()}
    assert statuses == {"x": 404, "e": 400, "s": 400}
    error = errors["s"]["response"]["body"]["error"]
    assert (error["code"], error["param"]) == ("unsupported", "stream")
    new = {name: worker.submits[before[name] :] for name, worker in workers.items()}
    assert {name: len(submits) for name, submits in new.items()} == {"demo": 1, "other": 2, "embedder": 0}
    assert {submit.priority for submits in new.values() for submit in submits} == {100}


async def test_lines_of_embeddings_have_the_answer_of_the_route(house: House) -> None:
    client, workers = house
    before = len(workers["embedder"].submits)
    body: dict[str, Any] = {"model": "embedder", "input": TEXTS, "dimensions": SIZE}
    lines = [
        line("many", EMBEDDINGS, **body),
        line("base64", EMBEDDINGS, model="embedder", input=TEXTS[0], encoding_format="base64"),
        line("generates", EMBEDDINGS, model="demo", input=TEXTS[0]),
        line("wrong", EMBEDDINGS, model="embedder", input=[]),
        line("long", EMBEDDINGS, model="embedder", input=[1] * 4096),
    ]
    done = await ended(client, await started(client, jsonl(*lines), EMBEDDINGS))
    found = await answers(client, done.output_file_id)
    many = found["many"]["response"]["body"]
    assert [one["index"] for one in many["data"]] == [0, 1]
    for text, one in zip(TEXTS, many["data"], strict=True):
        expected = expected_embedding(load_tokenizer(MODEL).encode(text), SIZE)
        assert one["embedding"] == pytest.approx(expected)
    direct = await client.with_raw_response.embeddings.create(
        model="embedder", input=TEXTS[0], encoding_format="base64"
    )
    assert found["base64"]["response"]["body"]["data"] == json.loads(direct.content)["data"]
    errors = await answers(client, done.error_file_id)
    told = {name: one["response"]["body"]["error"]["param"] for name, one in errors.items()}
    assert told == {"generates": "model", "wrong": "input", "long": "input"}
    # The last one is that of the direct call.
    assert [submit.priority for submit in workers["embedder"].submits[before:]] == [100, 100, 100, 0]


async def test_a_batch_of_embeddings_has_a_bounded_number_of_inputs(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = house
    monkeypatch.setattr(runner, "MAX_INPUTS", 3)
    lines = [line(name, EMBEDDINGS, model="embedder", input=TEXTS) for name in "ab"]
    assert (await ended(client, await started(client, jsonl(lines[0]), EMBEDDINGS))).status == "completed"
    failed = await ended(client, await started(client, jsonl(*lines), EMBEDDINGS))
    assert failed.errors is not None
    assert [error.code for error in failed.errors.data or ()] == ["too_many_inputs"]
    counts = {"x": 1, "[1, 2]": 1, '["x", "y"]': 2, "[[1], [2], [3]]": 3, "[]": 1, "null": 1}
    for asked, count in counts.items():
        assert num_inputs({"input": asked if asked == "x" else json.loads(asked)}) == count
