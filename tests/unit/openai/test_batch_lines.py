"""Lines of batches for each route, and for each of several models."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.router.config import ServedModel
from blockyard.router.openai.batches import runner
from blockyard.router.openai.batches.lines import num_inputs
from openai import AsyncOpenAI

from tests.unit.router.fake_worker import FakeWorker, expected_embedding
from tests.unit.router.test_models import OTHER, served

from .embedding_rig import EMBEDDINGS, SIZE, embedding_folder
from .rig import CHAT, COMPLETIONS, HELLO, Gateway, running_gateway, served_by, worker_of_model
from .test_batches import answers, ended, jsonl, started
from .test_embeddings import tokens_of
from .test_responses import RESPONSES
from .test_tools import prompt_of, says

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXTS = ["import os", "import sys"]


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[AsyncOpenAI, dict[str, FakeWorker]]]:
    """A client of a router with two models that generate and one that embeds."""
    folder = tmp_path_factory.mktemp("house")
    embedder = ServedModel(
        model=str(embedding_folder(folder / "model")), names=("embedder",), index="embedder"
    )
    async with AsyncExitStack() as stack:
        router, workers = await stack.enter_async_context(
            served(OTHER, embedder, batch_dir=str(folder / "batches"), max_requests=64)
        )
        client = await stack.enter_async_context(Gateway(router=router).client())
        yield client, workers


House = tuple[AsyncOpenAI, dict[str, FakeWorker]]


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
    done = await ended(client, await started(client, jsonl(*lines), url))
    found = await answers(client, done.output_file_id)
    models = {name: one["response"]["body"]["model"] for name, one in found.items()}
    assert models == {"d": "demo", "o": "other", "a": "other"}, "an answer has the model's id"
    errors = await answers(client, done.error_file_id)
    statuses = {name: one["response"]["status_code"] for name, one in errors.items()}
    assert statuses == {"x": 404, "e": 400}
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
        assert one["embedding"] == pytest.approx(expected_embedding(tokens_of(text), SIZE))
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
    allowed = await ended(client, await started(client, jsonl(lines[0]), EMBEDDINGS))
    assert allowed.status == "completed"
    failed = await ended(client, await started(client, jsonl(*lines), EMBEDDINGS))
    assert failed.status == "failed"
    assert failed.errors is not None
    assert [error.code for error in failed.errors.data or ()] == ["too_many_inputs"]


@pytest.mark.parametrize(
    ("asked", "count"), [("x", 1), ([1, 2], 1), (["x", "y"], 2), ([[1], [2], [3]], 3), ([], 1), (None, 1)]
)
async def test_inputs_are_counted_as_the_route_reads_them(asked: Any, count: int) -> None:
    assert num_inputs({"input": asked}) == count


async def test_a_line_goes_on_from_a_stored_response_of_its_tenant(tmp_path: Path) -> None:
    process = start_private_redis(tmp_path)
    try:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(
                running_gateway(batch_dir=str(tmp_path / "batches"), redis_url=process.url)
            )
            worker = await stack.enter_async_context(served_by(gateway, worker_of_model("a")))
            client = await stack.enter_async_context(gateway.client())
            says(worker, "It is mild.")
            first = await client.responses.create(model="demo", input="Is it mild?")
            lines = [
                line("next", RESPONSES, model="demo", input="And Rome?", previous_response_id=first.id),
                line("none", RESPONSES, model="demo", input="x", previous_response_id="resp_" + "0" * 48),
                line("stream", RESPONSES, model="demo", input="x", stream=True),
            ]
            done = await ended(client, await started(client, jsonl(*lines), RESPONSES))
            found = await answers(client, done.output_file_id)
            errors = await answers(client, done.error_file_id)
            assert (found.keys(), errors.keys()) == ({"next"}, {"none", "stream"})
            answer = found["next"]["response"]["body"]
            assert answer["previous_response_id"] == first.id
            for text in ("Is it mild?", "It is mild.", "And Rome?"):
                assert text in prompt_of(worker)
            told = {name: one["response"]["body"]["error"] for name, one in errors.items()}
            assert (told["none"]["code"], told["none"]["param"]) == (
                "response_not_found",
                "previous_response_id",
            )
            assert (told["stream"]["code"], told["stream"]["param"]) == ("unsupported", "stream")
            later = await client.responses.retrieve(answer["id"])
            assert later.output_text == "It is mild.", "answers of lines are stored as those of calls are"
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve("resp_" + "1" * 48)
    finally:
        process.stop()
