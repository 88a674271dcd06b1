"""LoRA adapters over gRPC and HTTP: who may name one, what workers are told, and names of blocks. Workers are scripted.

tests/nightly/cluster/test_two_models.py has real workers.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio
from blockyard.proto.naming.block_hash import split_names
from blockyard.proto.v1 import admin_pb2, cluster_pb2
from blockyard.proto.v1.admin_pb2_grpc import AdminServiceStub
from blockyard.router.client.aio import AsyncClient
from blockyard.router.client.errors import (
    BlockyardError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from openai import AsyncOpenAI

from tests.unit.router.fake_worker import expected_tokens
from tests.unit.router.rig import reason_of, refused, request

from .rig import (
    CHAT,
    COMPLETIONS,
    HELLO,
    FakeWorker,
    Gateway,
    Script,
    answers,
    ended,
    jsonl,
    line,
    running_gateway,
    started,
    until,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "def f(x):\n" * 8
FOLDERS = {"sql": "1" * 32, "law": "2" * 32}
MESSAGES = "/v1/messages"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(no_worker_seconds=0.5) as running:
        yield running


def able(name: str, **settings: Any) -> FakeWorker:
    worker = worker_of_model(name, max_loras=2, **settings)
    worker.folders = dict(FOLDERS)
    return worker


@pytest_asyncio.fixture(loop_scope="module")
async def worker(gateway: Gateway) -> AsyncIterator[FakeWorker]:
    async with gateway.router.workers(able("a")) as (only,):
        yield only
        await until(lambda: only.num_running == 0)


@pytest_asyncio.fixture(loop_scope="module")
async def admin(gateway: Gateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient([gateway.router.address]) as made:
        yield made
        for adapter in await made.list_adapters():
            await made.remove_adapter(adapter.name)


@pytest_asyncio.fixture(loop_scope="module")
async def sql(gateway: Gateway, admin: AsyncClient) -> str:
    """The name of an adapter that a worker has read which is gone now."""
    async with gateway.router.workers(able("gone")):
        await admin.add_adapter("sql", "sql")
    return "sql"


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with gateway.client() as made:
        yield made


async def test_each_way_of_naming_an_adapter_reaches_the_worker_and_the_answer_has_its_name(
    gateway: Gateway, worker: FakeWorker, admin: AsyncClient, client: AsyncOpenAI
) -> None:
    added = await admin.add_adapter("sql", "sql")
    assert (added.fingerprint, added.rank) == (FOLDERS["sql"], 8)
    answers = [
        await client.chat.completions.create(model="sql", messages=HELLO, max_tokens=3, seed=1),
        await client.completions.create(model="sql", prompt=PROMPT, max_tokens=3, seed=1),
        await client.responses.create(model="sql", input="hello", max_output_tokens=3),
    ]
    assert [answer.model for answer in answers] == ["sql"] * 3
    message = {"model": "sql", "max_tokens": 3, "messages": HELLO}
    assert (await gateway.post(message, MESSAGES)).status == 200
    await admin.generate(PROMPT, lora_name="sql", max_tokens=3)
    await admin.generate(PROMPT, model="sql", max_tokens=3)
    await admin.generate(PROMPT, model="demo", lora_name="sql", max_tokens=3)
    assert [(s.lora_name, s.lora_fingerprint) for s in worker.submits] == [("sql", FOLDERS["sql"])] * 7
    await client.completions.create(model="demo", prompt=PROMPT, max_tokens=3)
    assert worker.submits[-1].lora_fingerprint == ""


async def test_a_line_of_a_batch_may_name_an_adapter(tmp_path: Path) -> None:
    async with (
        running_gateway(batch_dir=str(tmp_path)) as gateway,
        gateway.router.workers(able("a")) as (worker,),
        AsyncClient([gateway.router.address]) as admin,
        gateway.client() as client,
    ):
        await admin.add_adapter("sql", "sql")
        await admin.add_adapter("law", "law", tenant="acme")
        lines = [line(name, model=name) for name in ("sql", "demo", "law")]
        done = await ended(client, await started(client, jsonl(*lines)))
        found, errors = await answers(client, done.output_file_id), await answers(client, done.error_file_id)
        models = {name: one["response"]["body"]["model"] for name, one in found.items()}
        assert models == {"sql": "sql", "demo": "demo"}
        statuses = {name: one["response"]["status_code"] for name, one in errors.items()}
        assert statuses == {"law": 404}, "the adapter of another tenant"
        named = {submit.lora_name: submit.lora_fingerprint for submit in worker.submits}
        assert (named, len(worker.submits)) == ({"sql": FOLDERS["sql"], "": ""}, 2)


async def test_blocks_of_an_adapter_have_names_of_its_content(worker: FakeWorker, admin: AsyncClient) -> None:
    """Neither the model, another adapter nor the same name with another content finds them."""

    async def names(**arguments: Any) -> list[bytes]:
        await admin.generate(PROMPT, max_tokens=1, **arguments)
        return split_names(worker.submits[-1].block_names)

    await admin.add_adapter("sql", "sql")
    await admin.add_adapter("law", "law")
    await admin.add_adapter("also-sql", "sql")
    bare = await names()
    sql, law, also_sql = [await names(lora_name=name) for name in ("sql", "law", "also-sql")]
    assert len(sql) > 1
    assert also_sql == sql, "the content counts, not the name"
    assert len({*bare, *sql, *law}) == len(bare) + len(sql) + len(law)
    found = await admin.lookup_prefix(PROMPT, lora_name="sql")
    assert list(found.block_names) == sql[1:]
    assert await admin.lookup_prefix(PROMPT, model="sql") == found, "in place of a model, as in Generate"
    worker.folders["sql"] = "3" * 32
    await admin.add_adapter("sql", "sql")
    again = await names(lora_name="sql")
    assert not set(again) & {*bare, *sql, *law}
    assert worker.submits[-1].lora_fingerprint == "3" * 32


async def test_a_session_of_an_adapter_is_another_than_the_models(
    worker: FakeWorker, admin: AsyncClient
) -> None:
    await admin.add_adapter("sql", "sql")
    await admin.generate(PROMPT, max_tokens=1, session_id="s", lora_name="sql")
    await admin.generate(PROMPT, max_tokens=1, session_id="s")
    first, second = worker.submits[-2:]
    assert first.block_names[:16] != second.block_names[:16]


async def test_models_lists_adapters_with_their_parent(
    gateway: Gateway, worker: FakeWorker, admin: AsyncClient, client: AsyncOpenAI
) -> None:
    await admin.add_adapter("sql", "sql")
    listed = {model.id: model for model in (await client.models.list()).data}
    assert listed.keys() == {"demo", "sql"}
    assert listed["sql"].model_dump()["parent"] == "demo"
    assert "parent" not in listed["demo"].model_dump()
    one = await client.models.retrieve("sql")
    assert one == listed["sql"]
    models = await admin.list_models()
    assert [(model.id, model.parent) for model in models] == [("demo", ""), ("sql", "demo")]


async def test_an_unknown_name_is_a_model_that_does_not_exist_and_none_embeds(
    gateway: Gateway, worker: FakeWorker, admin: AsyncClient, client: AsyncOpenAI
) -> None:
    await admin.add_adapter("sql", "sql")
    for path, asked in {
        CHAT: {"messages": HELLO},
        COMPLETIONS: {"prompt": "x"},
        MESSAGES: {"messages": HELLO, "max_tokens": 4},
        "/v1/responses": {"input": "x"},
    }.items():
        answer = await gateway.post({"model": "sqll", **asked}, path)
        assert (answer.status, b"sqll" in answer.body) == (404, True)
        assert path == MESSAGES or answer.error["code"] == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model="sql", input="x")
    assert caught.value.code == "unsupported"


async def test_only_its_tenant_finds_an_adapter(
    gateway: Gateway, worker: FakeWorker, admin: AsyncClient
) -> None:
    await admin.add_adapter("theirs", "law", tenant="acme")
    async with (
        AsyncClient([gateway.router.address], tenant="acme") as acme,
        AsyncClient([gateway.router.address], tenant="other") as other,
    ):
        assert (await acme.generate(PROMPT, lora_name="theirs", max_tokens=2)).token_ids
        assert "theirs" in [model.id for model in await acme.list_models()]
        for stranger in (other, admin):
            assert "theirs" not in [model.id for model in await stranger.list_models()]
            for asking in (
                stranger.generate(PROMPT, lora_name="theirs", max_tokens=2),
                stranger.generate(PROMPT, model="theirs", max_tokens=2),
                stranger.explain_placement(PROMPT, lora_name="theirs"),
                stranger.explain_placement(PROMPT, model="theirs"),
            ):
                with pytest.raises(NotFoundError) as caught:
                    await asking
                assert caught.value.reason == "MODEL_NOT_FOUND"
    answer = await gateway.post({"model": "theirs", "messages": HELLO}, CHAT, blockyard_tenant="acme")
    assert answer.status == 200
    assert (await gateway.post({"model": "theirs", "messages": HELLO}, CHAT)).status == 404
    assert [adapter.tenant for adapter in await admin.list_adapters()] == ["acme"], "an admin sees all"


WRONG = [
    ("", "sql"),
    ("no/name", "sql"),
    ("demo", "sql"),
    ("sql", ""),
    ("sql", "x" * 2000),
    ("sql", "elsewhere"),
]


async def test_what_cannot_be_added_or_removed_is_refused_and_changes_nothing(
    gateway: Gateway, admin: AsyncClient
) -> None:
    async with gateway.router.workers(able("a")):
        for name, path, tenant in [*((*pair, None) for pair in WRONG), ("sql", "sql", "no tenant")]:
            with pytest.raises(InvalidRequestError) as caught:
                await admin.add_adapter(name, path, **({"tenant": tenant} if tenant else {}))
            assert caught.value.reason == "INVALID_REQUEST"
        with pytest.raises(NotFoundError) as unknown:
            await admin.remove_adapter("sql")
        assert unknown.value.reason == "NOT_FOUND"
    async with gateway.router.workers(worker_of_model("a")):
        with pytest.raises(BlockyardError) as unable:
            await admin.add_adapter("sql", "sql")
        assert unable.value.reason == "UNSUPPORTED", "there are no slots anywhere"
    one, other = able("a"), able("b")
    other.folders["sql"] = "9" * 32
    async with gateway.router.workers(one, other):
        with pytest.raises(InvalidRequestError):
            await admin.add_adapter("sql", "sql")
        assert await admin.list_adapters() == []


async def test_a_folder_that_one_worker_refuses_is_read_by_no_other(
    gateway: Gateway, admin: AsyncClient
) -> None:
    workers = [able(name) for name in "abc"]
    async with gateway.router.workers(*workers):
        with pytest.raises(InvalidRequestError):
            await admin.add_adapter("spoilt", "spoilt")
        assert sum(len(worker.admin_calls) for worker in workers) == 1
        await admin.add_adapter("sql", "sql")
        assert [worker.adapters for worker in workers] == [{"sql": FOLDERS["sql"]}] * 3


async def test_a_worker_that_comes_later_reads_the_adapter_when_a_request_needs_it(
    gateway: Gateway, admin: AsyncClient, sql: str
) -> None:
    async with gateway.router.workers(able("late")) as (late,):
        done = await admin.generate(PROMPT, lora_name=sql, max_tokens=4, seed=5)
        assert done.token_ids == tuple(expected_tokens(5, 4))
        assert late.adapters == {sql: FOLDERS["sql"]}
        assert len(late.submits) == 2, "refused once, then served"


async def test_a_worker_with_another_content_in_the_folder_gets_no_requests_for_it(
    gateway: Gateway, admin: AsyncClient, sql: str
) -> None:
    wrong, right = able("wrong"), able("right")
    wrong.folders["sql"] = "8" * 32
    async with gateway.router.workers(wrong, right):
        for _ in range(6):
            done = await admin.generate(PROMPT, lora_name=sql, max_tokens=2)
            assert done.finish.worker_id == "right"
        assert (await admin.generate(PROMPT, max_tokens=2)).token_ids, "it still serves the model"
    async with gateway.router.workers(wrong_again := able("wrong")):
        wrong_again.folders.clear()
        with pytest.raises(UnavailableError) as caught:
            await admin.generate(PROMPT, lora_name=sql, max_tokens=2, timeout_seconds=2.0)
        assert caught.value.reason == "NO_WORKERS"


async def test_requests_for_an_adapter_go_to_the_worker_that_has_it(
    gateway: Gateway, admin: AsyncClient, sql: str
) -> None:
    workers = [able(name) for name in "bcd"]
    holder = workers[1]
    resident = cluster_pb2.ResidentAdapter(fingerprint=FOLDERS["sql"], load_seconds=0.5)
    holder.load.adapters.append(resident)
    for one in workers:
        one.load.adapter_load_seconds = 0.5
        one.adapters = {sql: FOLDERS["sql"]}
    async with gateway.router.workers(*workers):
        for _ in range(5):
            assert (await admin.generate(PROMPT, lora_name=sql, max_tokens=1)).finish.worker_id == "c"
        explained = await admin.explain_placement(PROMPT, lora_name=sql)
        prices = {one.worker_id: one.adapter_ms for one in explained.candidates}
        assert prices == pytest.approx({"b": 500.0, "c": 0.0, "d": 500.0})
        assert explained.chosen_worker_id == "c"
        bare = await admin.explain_placement(PROMPT)
        assert {one.adapter_ms for one in bare.candidates} == {0.0}


async def test_a_removed_adapter_ends_no_running_request_and_takes_no_new_one(
    gateway: Gateway, worker: FakeWorker, admin: AsyncClient
) -> None:
    await admin.add_adapter("sql", "sql")
    worker.script = lambda submit: Script(step_seconds=0.02)
    running = asyncio.create_task(admin.generate(PROMPT, lora_name="sql", max_tokens=20, seed=3))
    await until(lambda: worker.num_running == 1)
    await admin.remove_adapter("sql")
    assert (await running).token_ids == tuple(expected_tokens(3, 20))
    assert worker.adapters == {}
    error = await refused(gateway.router.inference.Generate(request(lora_name="sql")))
    assert reason_of(error) == "MODEL_NOT_FOUND"


async def test_a_request_that_loses_its_worker_goes_on_with_its_adapter_elsewhere(
    gateway: Gateway, admin: AsyncClient, sql: str
) -> None:
    dying, other = able("dying"), able("other")
    dying.script = lambda submit: Script(exit_after=3)
    dying.adapters = {sql: FOLDERS["sql"]}
    resident = cluster_pb2.ResidentAdapter(fingerprint=FOLDERS["sql"], load_seconds=0.5)
    dying.load.adapters.append(resident)
    other.load.adapter_load_seconds = 0.5
    async with gateway.router.workers(dying, other):
        done = await admin.generate(PROMPT, lora_name=sql, max_tokens=12, seed=7)
        assert done.token_ids == tuple(expected_tokens(7, 12))
        assert other.submits[-1].block_names == dying.submits[0].block_names
        assert other.submits[-1].lora_fingerprint == FOLDERS["sql"]


async def test_a_worker_that_never_keeps_the_adapter_is_given_up(
    gateway: Gateway, admin: AsyncClient, sql: str
) -> None:

    async def forget(request: admin_pb2.AddAdapterRequest, context: Any) -> admin_pb2.AddAdapterResponse:
        return admin_pb2.AddAdapterResponse(adapter=admin_pb2.Adapter(fingerprint=FOLDERS["sql"]))

    forgetful = able("forgetful")
    forgetful.AddAdapter = forget  # type: ignore[method-assign]
    async with gateway.router.workers(forgetful):
        with pytest.raises(BlockyardError) as caught:
            await admin.generate(PROMPT, lora_name=sql, max_tokens=2, timeout_seconds=5.0)
        assert caught.value.reason == "NO_WORKERS"


async def test_a_worker_that_does_not_answer_adds_nothing(gateway: Gateway, worker: FakeWorker) -> None:
    stub: Any = AdminServiceStub(gateway.router.channel)  # type: ignore[no-untyped-call]
    worker.admin_failure = grpc.StatusCode.INTERNAL
    error = await refused(stub.AddAdapter(admin_pb2.AddAdapterRequest(name="sql", path="sql")))
    assert reason_of(error) == "WORKER_UNREACHABLE"
    worker.admin_failure = None
