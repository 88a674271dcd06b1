"""Adapters of several models behind one router, with scripted workers and a real Redis: names, choice and removal."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio
import redis
from blockyard.deploy.machine.redis_server import RedisProcess
from blockyard.proto.index.redis import connect
from blockyard.proto.v1 import admin_pb2, cluster_pb2
from blockyard.router.adapters.log import AdapterLog
from blockyard.router.client.aio import AsyncClient
from blockyard.router.client.errors import InvalidRequestError, NotFoundError
from blockyard.router.config import ServedModel

from tests.unit.router.fake_worker import FakeWorker, expected_tokens
from tests.unit.router.models_rig import DEMO, LIST, OTHER, groups, worker_of
from tests.unit.router.rig import Router, running_router, until

SECRET = "correct-horse-of-the-models"
CONTENTS = {"sql": "1" * 32, "law": "2" * 32}


def able(model: ServedModel) -> FakeWorker:
    worker = worker_of(model, max_loras=2)
    worker.folders = dict(CONTENTS)
    return worker


async def keep_logs(router: Router, client: redis.asyncio.Redis, cluster: str) -> None:
    """Let the router keep the adapters of its models in this Redis, and nothing else."""
    for group in groups(router):
        log = AdapterLog([client], cluster=cluster, secret=SECRET, model=group.model)
        group.parts.adapters._log = log
        await group.parts.adapters.refresh()


@asynccontextmanager
async def served(
    server: RedisProcess, cluster: str = "shared"
) -> AsyncIterator[tuple[Router, dict[str, FakeWorker], AsyncClient]]:
    """A router of `demo` and `other`, with a worker of two slots for each."""
    async with AsyncExitStack() as stack:
        client = connect(server.url, timeout_seconds=5.0, has_deadlines=True)
        stack.push_async_callback(client.aclose)
        router = await stack.enter_async_context(running_router(further_models=(OTHER,)))
        await keep_logs(router, client, cluster)
        workers = {model.id: await stack.enter_async_context(able(model)) for model in (DEMO, OTHER)}
        for name, worker in workers.items():
            router.server.set_workers([worker.address], name)
        await until(lambda: router.server.num_ready_workers == 2)
        yield router, workers, await stack.enter_async_context(AsyncClient([router.address]))


Served = tuple[Router, dict[str, FakeWorker], AsyncClient]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(server: RedisProcess) -> AsyncIterator[tuple[Served, Served]]:
    """Two routers, for tests that leave their models as they are."""
    async with served(server) as one, served(server) as other:
        yield one, other


@pytest_asyncio.fixture(loop_scope="module")
async def pair(both: tuple[Served, Served]) -> AsyncIterator[tuple[Served, Served]]:
    # On a busy machine the workers may have been silent meanwhile.
    await until(lambda: all(router.server.num_ready_workers == 2 for router, _, _ in both))
    yield both
    for model in ("demo", "other"):
        for _, workers, admin in both:
            for adapter in await admin.list_adapters(model=model):
                await admin.remove_adapter(adapter.name, model=model)
            workers[model].submits.clear()
            workers[model].load.Clear()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_is_added_to_the_named_model_alone_and_by_default_to_the_first(pair):
    ((router, workers, admin), _) = pair
    added = await admin.add_adapter("sql", "sql", model="alias")
    assert (added.name, added.model) == ("sql", "other")
    assert (await admin.add_adapter("law", "law")).model == "demo"
    assert [worker.adapters for worker in workers.values()] == [
        {"law": CONTENTS["law"]},
        {"sql": CONTENTS["sql"]},
    ]
    names = [(one.id, one.parent) for one in (await router.inference.ListModels(LIST)).models]
    assert names == [("demo", ""), ("law", "demo"), ("other", ""), ("alias", ""), ("sql", "other")]
    for naming in ({"model": "sql"}, {"lora_name": "sql"}, {"model": "other", "lora_name": "sql"}):
        before = len(workers["other"].submits)
        await admin.generate("a = 1", max_tokens=1, **naming)
        assert [submit.lora_name for submit in workers["other"].submits[before:]] == ["sql"]
        explained = await admin.explain_placement("a = 1", **naming)
        assert [one.worker_id for one in explained.candidates] == ["other-worker"]
    assert workers["demo"].submits == []
    with pytest.raises(NotFoundError):
        await admin.generate("a = 1", max_tokens=1, model="demo", lora_name="sql")
    with pytest.raises(NotFoundError):
        await admin.remove_adapter("sql")
    assert [one.name for one in await admin.list_adapters()] == ["law"]
    assert [one.name for one in await admin.list_adapters(model="other")] == ["sql"]
    await admin.remove_adapter("sql", model="other")
    assert await admin.list_adapters(model="other") == []
    for call in (
        admin.add_adapter("new", "sql", model="nothing"),
        admin.remove_adapter("law", model="nothing"),
        admin.list_adapters(model="nothing"),
    ):
        with pytest.raises(NotFoundError):
            await call


@pytest.mark.parametrize(
    ("name", "model"),
    [("other", "demo"), ("alias", "demo"), ("demo", "other"), ("demo", None), ("sql", "demo")],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_name_of_a_model_or_of_another_models_adapter_is_refused_and_nothing_is_read(
    pair: tuple[Served, Served], name: str, model: str | None
) -> None:
    ((_, workers, admin), _) = pair
    await admin.add_adapter("sql", "sql", model="other")
    with pytest.raises(InvalidRequestError) as refused:
        await admin.add_adapter(name, "law", model=model)
    assert (refused.value.code, refused.value.reason) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "INVALID_REQUEST",
    )
    assert [one.field for one in refused.value.field_violations] == ["name"]
    assert [worker.adapters for worker in workers.values()] == [{}, {"sql": CONTENTS["sql"]}]
    again = await admin.add_adapter("sql", "law", model="other")
    assert again.fingerprint == CONTENTS["law"], "the same model may replace its own"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_name_that_another_router_has_just_given_to_another_model_is_refused(pair):
    (_, _, one), (_, _, other) = pair
    await one.add_adapter("sql", "sql", model="other")
    with pytest.raises(InvalidRequestError) as refused:
        await other.add_adapter("sql", "sql")
    assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.asyncio(loop_scope="module")
async def test_of_two_simultaneous_additions_to_two_models_at_most_one_gets_the_name(pair):
    (_, _, one), (_, _, other) = pair
    for _ in range(5):
        results = await asyncio.gather(
            one.add_adapter("sql", "sql"),
            other.add_adapter("sql", "sql", model="other"),
            return_exceptions=True,
        )
        listed = [adapter for model in ("demo", "other") for adapter in await one.list_adapters(model=model)]
        assert len(listed) == sum(isinstance(result, admin_pb2.Adapter) for result in results) <= 1
        for refused in results:
            if not isinstance(refused, admin_pb2.Adapter):
                assert isinstance(refused, InvalidRequestError)
                assert refused.code is grpc.StatusCode.ALREADY_EXISTS
        for adapter in listed:
            await one.remove_adapter(adapter.name, model=adapter.model)
        await other.list_adapters()
        await other.list_adapters(model="other")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_cost_of_loading_an_adapter_is_that_of_its_models_workers(pair: tuple[Served, Served]):
    """Both models have an adapter of the same content. What one's workers hold says nothing about the other's."""
    ((_, workers, admin), _) = pair
    resident = cluster_pb2.ResidentAdapter(fingerprint=CONTENTS["sql"], load_seconds=0.5)
    workers["demo"].load.adapters.append(resident)
    for worker in workers.values():
        worker.load.adapter_load_seconds = 0.5
    await admin.add_adapter("of-demo", "sql")
    await admin.add_adapter("of-other", "sql", model="other")

    async def costs() -> list[float]:
        explained = [
            await admin.explain_placement("a = 1", lora_name=name) for name in ("of-demo", "of-other")
        ]
        return [one.adapter_ms for each in explained for one in each.candidates]

    async def are_known() -> bool:
        return await costs() == [0.0, 500.0]

    await until(are_known)


async def test_the_adapters_of_a_removed_model_end_with_it_and_are_not_inherited(operator, server):
    async with served(server, "own") as (router, workers, admin):
        await admin.add_adapter("law", "law")
        await admin.add_adapter("sql", "sql", model="other")
        assert len(operator.keys("blockyard:own:*")) == 2
        running = asyncio.ensure_future(
            admin.generate("a = 1", model="sql", max_tokens=60, seed=1, temperature=1.0)
        )
        await until(lambda: len(workers["other"].submits) == 1)
        await router.server.set_models((DEMO,), grace_seconds=60.0)
        assert list((await running).token_ids) == expected_tokens(1, 60)
        assert len(operator.keys("blockyard:own:*")) == 1
        with pytest.raises(NotFoundError):
            await admin.generate("a = 1", model="sql", max_tokens=1)
        assert (await admin.add_adapter("sql", "sql")).model == "demo", "its name is free again"
        router.server.set_workers([workers["other"].address], "other")
        await router.server.set_models((DEMO, OTHER), grace_seconds=5.0)
        await keep_logs(router, groups(router).default.parts.adapters._log._client, "own")  # type: ignore[union-attr]
        assert await admin.list_adapters(model="other") == []
        assert [one.name for one in await admin.list_adapters()] == ["law", "sql"]


@pytest.mark.parametrize(
    ("changed", "num_logs"),
    [(replace(OTHER, names=("other", "new-alias")), 1), (replace(OTHER, addition="again"), 0)],
)
async def test_a_model_that_takes_its_own_place_keeps_its_adapters_unless_it_was_added_again(
    operator: "redis.Redis", server: RedisProcess, changed: ServedModel, num_logs: int
) -> None:
    async with served(server, "own") as (router, _, admin):
        await admin.add_adapter("sql", "sql", model="other")
        old = groups(router).of("other").parts.fleet
        await router.server.set_models((DEMO, changed), grace_seconds=0.0)
        await until(lambda: not any(link.is_up for link in old.links.values()))
        await asyncio.sleep(0.2 if num_logs else 0.0)  # Nothing tells that no erasure comes.
        await until(lambda: len(operator.keys("blockyard:own:*")) == num_logs)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_for_an_adapter_that_is_removed_ends_whole_while_the_other_model_goes_on(pair):
    ((_, workers, admin), _) = pair
    await admin.add_adapter("sql", "sql", model="other")
    streams = [
        asyncio.ensure_future(admin.generate("a = 1", model=name, max_tokens=60, seed=1, temperature=1.0))
        for name in ("demo", "sql")
    ]
    await until(lambda: all(worker.submits for worker in workers.values()))
    await admin.remove_adapter("sql", model="other")
    assert [list((await one).token_ids) for one in streams] == [expected_tokens(1, 60)] * 2
