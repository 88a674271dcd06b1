"""/v1/embeddings and Embed: values, usage, sizes, refusals, and lost workers. The workers are scripted."""

import base64
import json
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import openai
import pytest
import pytest_asyncio
from blockyard.proto.naming.block_hash import unpack_tokens
from blockyard.proto.naming.pooling import Pooling
from blockyard.proto.text import load_tokenizer
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.client import AsyncClient, InvalidRequestError
from blockyard.router.generation.embedding import sized
from blockyard.router.openai import embeddings
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from tests.unit.router.fake_worker import expected_embedding
from tests.unit.router.rig import fields_of, reason_of, refused

from .rig import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    HELLO,
    MODEL,
    SIZE,
    FakeWorker,
    Gateway,
    Script,
    running_embedder,
    running_gateway,
    until,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXTS = ["import os", "def f(x):\n    return x", "import sys"]


def tokens_of(text: str) -> list[int]:
    tokens: list[int] = load_tokenizer(MODEL).encode(text)
    return tokens


def embedding_of(text: str) -> list[float]:
    return expected_embedding(tokens_of(text), SIZE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("embedder") / "model"
    async with running_embedder(folder, max_requests=64, max_migrations=2) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def worker(embedder: Gateway) -> AsyncIterator[FakeWorker]:
    async with embedder.router.workers(worker_of_model("a")) as (only,):
        yield only
        await until(lambda: only.num_running == 0)


@pytest_asyncio.fixture(loop_scope="module")
async def client(embedder: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with embedder.client() as made:
        yield made


async def test_openais_client_gets_each_text_in_order(client: AsyncOpenAI, worker: FakeWorker) -> None:
    """It asks for base64 unless told otherwise, and decodes it."""
    for more in ({}, {"encoding_format": "float"}):
        answer = await client.embeddings.create(model="demo", input=TEXTS, **more)
        assert [item.embedding for item in answer.data] == [embedding_of(text) for text in TEXTS]
        assert [item.index for item in answer.data] == [0, 1, 2]
        assert {item.object for item in answer.data} == {"embedding"}
        assert (answer.object, answer.model) == ("list", "demo")
        tokens = sum(len(tokens_of(text)) for text in TEXTS)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


async def test_an_input_is_a_text_or_tokens_or_a_list_of_either(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    (text, other, _), tokens = TEXTS, [tokens_of(text) for text in TEXTS]
    for given_input, texts in ((text, [text]), (tokens[0], [text]), (tokens[:2], [text, other])):
        answer = await client.embeddings.create(model="demo", input=given_input)
        assert [item.embedding for item in answer.data] == [embedding_of(text) for text in texts]


async def test_base64_is_little_endian_float32(embedder: Gateway, worker: FakeWorker) -> None:
    answer = await embedder.post(
        {"input": "import os", "encoding_format": "base64", "user": "me"}, EMBEDDINGS
    )
    (item,) = json.loads(answer.body)["data"]
    assert list(struct.unpack(f"<{SIZE}f", base64.b64decode(item["embedding"]))) == embedding_of("import os")
    assert answer.headers["blockyard-ignored"] == "user"
    (submit,) = worker.submits
    assert (submit.sampling.embeds, submit.sampling.max_tokens, submit.hands_over) == (True, 0, False)
    assert unpack_tokens(submit.token_ids) == tokens_of("import os")


async def test_fewer_dimensions_are_the_first_at_length_1(client: AsyncOpenAI, worker: FakeWorker) -> None:
    whole = embedding_of("import os")
    at = next(place for place, value in enumerate(whole) if value < 0)
    for dimensions in (SIZE, at + 1):
        answer = await client.embeddings.create(model="demo", input="import os", dimensions=dimensions)
        (item,) = answer.data
        first = np.array(whole[:dimensions], np.float32)
        np.testing.assert_allclose(item.embedding, first / np.linalg.norm(first), atol=1e-7)
        assert len(item.embedding) == dimensions


@given(
    values=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=40),
    dimensions=st.none() | st.integers(1, 40),
    normalizes=st.booleans(),
)
async def test_any_size_keeps_the_direction_of_its_first_numbers(
    values: list[float], dimensions: int | None, normalizes: bool
) -> None:
    whole = np.array(values, "<f4")
    made = sized(whole.tobytes(), dimensions, Pooling(normalizes=normalizes))
    assert made.dtype == np.float32
    assert len(made) == min(dimensions or len(whole), len(whole))
    first = whole[: len(made)].astype(np.float64)
    length = np.linalg.norm(first)
    if len(made) == len(whole) or not normalizes:
        assert made.tolist() == first.tolist()
    elif length > 1e-6:
        np.testing.assert_allclose(made * length, first, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(made.astype(np.float64)), 1, atol=1e-6)


async def test_many_inputs_are_one_call_with_a_bounded_number_at_once(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    texts = [f"x = {number}" for number in range(70)]
    answer = await client.embeddings.create(model="demo", input=texts)
    assert [item.embedding for item in answer.data] == [embedding_of(text) for text in texts]
    assert len({submit.request_id for submit in worker.submits}) == 70


async def test_an_answer_has_a_bounded_number_of_numbers(
    client: AsyncOpenAI, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 2 * SIZE)
    assert len((await client.embeddings.create(model="demo", input=TEXTS[:2])).data) == 2
    assert len((await client.embeddings.create(model="demo", input=TEXTS, dimensions=2)).data) == 3
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.embeddings.create(model="demo", input=TEXTS)
    assert refusal.value.param == "input"


async def test_grpc_gives_the_same_with_its_usage(embedder: Gateway, worker: FakeWorker) -> None:
    async with AsyncClient(embedder.router.address) as made:
        begun = time.monotonic()
        found = await made.embed("import os", request_id="r-1")
        assert list(found.values) == embedding_of("import os")
        assert (found.request_id, found.worker_id, found.migrations) == ("r-1", "a", 0)
        assert (found.prompt_tokens, found.cached_tokens) == (len(tokens_of("import os")), 16)
        assert 0 < found.total_seconds < time.monotonic() - begun
        by_tokens = await made.embed(prompt_token_ids=tokens_of("import os"), dimensions=SIZE)
        assert by_tokens.values == found.values
        (model, *_) = await made.list_models()
        assert model.embedding_size == SIZE
        with pytest.raises(ValueError, match="exactly one"):
            await made.embed()


async def test_a_prompt_may_fill_the_context(embedder: Gateway, worker: FakeWorker) -> None:
    async with AsyncClient(embedder.router.address) as made:
        assert (await made.embed(prompt_token_ids=[5] * 512)).prompt_tokens == 512
        cut = await made.embed(prompt_token_ids=[5] * 600, truncate_prompt_tokens=-1)
        assert cut.prompt_tokens == 512
        with pytest.raises(InvalidRequestError, match="513 tokens do not fit a context of 512"):
            await made.embed(prompt_token_ids=[5] * 513)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [5, "a"]}, "input"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": [[5, -1]]}, "input[0]"),
        ({"input": [9999]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "temperature": 1}, "temperature"),
        # Hints of calls that generate.
        ({"input": "a", "prefetch": True}, "prefetch"),
        ({"input": "a", "expected_pause_seconds": 5}, "expected_pause_seconds"),
    ],
)
async def test_a_bad_field_is_named_as_in_the_body(
    embedder: Gateway, worker: FakeWorker, body: dict[str, Any], param: str
) -> None:
    answer = await embedder.post(body, EMBEDDINGS)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, "invalid_request")
    assert answer.error["message"].startswith(f"{param}: ")
    assert not worker.submits


async def test_a_prompt_that_is_too_long_and_an_unknown_model_have_their_codes(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        await client.embeddings.create(model="demo", input=[5] * 513)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.embeddings.create(model="gpt", input="a")
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})])
async def test_an_embedding_model_refuses_to_generate(
    embedder: Gateway, worker: FakeWorker, path: str, body: dict[str, Any]
) -> None:
    answer = await embedder.post(body, path)
    assert answer.error["message"] == "model: is an embedding model, which generates no text"
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported", "model")
    error = await refused(embedder.router.inference.Generate(inference_pb2.GenerateRequest(prompt="a")))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED")
    assert fields_of(error) == ["model"]
    assert not worker.submits


async def test_a_model_that_generates_refuses_to_embed() -> None:
    async with running_gateway() as gateway, gateway.router.workers(worker_of_model("a")) as (worker,):
        answer = await gateway.post({"input": "a"}, EMBEDDINGS)
        assert answer.error["message"] == "model: generates text, and is no embedding model"
        error = await refused(gateway.router.inference.Embed(inference_pb2.EmbedRequest(prompt="a")))
        assert (answer.status, error.code()) == (400, grpc.StatusCode.UNIMPLEMENTED)
        assert not worker.submits


@pytest.mark.parametrize(
    "fault", [{"die_after": 0}, {"omit_embedding": True}, {"reject": session_pb2.REJECT_REASON_BUSY}]
)
async def test_a_request_goes_on_where_its_worker_fails(
    embedder: Gateway, client: AsyncOpenAI, fault: dict[str, Any]
) -> None:
    faulty = True

    def script(submit: session_pb2.Submit) -> Script:
        nonlocal faulty
        was, faulty = faulty, False
        return Script(**fault) if was else Script()

    workers = [worker_of_model(name, script=script) for name in ("a", "b")]
    async with embedder.router.workers(*workers):
        answer = await client.embeddings.create(model="demo", input="import os")
        assert answer.data[0].embedding == embedding_of("import os")
        assert sum(len(worker.submits) for worker in workers) == 2


async def test_the_model_is_listed_with_the_size_of_its_embeddings(embedder: Gateway) -> None:
    (model, *_) = json.loads((await embedder.get("/v1/models")).body)["data"]
    assert model["embedding_size"] == SIZE
