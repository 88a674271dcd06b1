"""Several models behind one router, with scripted workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.proto.v1.admin_pb2_grpc import AdminServiceStub
from blockyard.router.adapters.registry import Change, RegisteredAdapter
from blockyard.router.composition import adapter_log, build_group, build_shared
from blockyard.router.config import RouterConfig, ServedModel
from blockyard.router.services import interceptor
from blockyard.router.supervision import Attempts

from .fake_worker import FakeWorker, Script, expected_tokens
from .models_rig import DEMO, LIST, OTHER, groups, served
from .rig import FOREVER, MODEL, Router, refused, request, until


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[tuple[Router, dict[str, FakeWorker]]]:
    """One router of both models, for tests that leave it as it is."""
    async with served(OTHER, max_requests=8) as both:
        yield both


Pair = tuple[Router, dict[str, FakeWorker]]


async def ask(router: Router, model: str | None, **fields: Any) -> inference_pb2.GenerateResponse:
    named = {} if model is None else {"model": model}
    response: inference_pb2.GenerateResponse = await router.inference.Generate(request(**named, **fields))
    return response


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_goes_to_the_workers_of_its_model(pair: Pair) -> None:
    router, workers = pair
    for name, model in ((None, "demo"), ("demo", "demo"), ("other", "other"), ("alias", "other")):
        before = {each: len(worker.submits) for each, worker in workers.items()}
        answer = await ask(router, name)
        assert list(answer.token_ids) == expected_tokens(1, 20)
        assert {each: len(worker.submits) - before[each] for each, worker in workers.items()} == {
            each: int(each == model) for each in workers
        }


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_that_is_not_served_is_not_found_and_the_answer_names_all_that_are(pair: Pair) -> None:
    router, _ = pair
    error = await refused(ask(router, "nothing"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "`demo`, `other`, `alias`" in (error.details() or "")
    for question in (
        router.cluster.LookupPrefix(cluster_pb2.LookupPrefixRequest(prompt="x", model="nothing")),
        router.cluster.ExplainPlacement(cluster_pb2.ExplainPlacementRequest(prompt="x", model="nothing")),
        router.cluster.GetIndexInfo(cluster_pb2.GetIndexInfoRequest(model="nothing")),
        router.inference.Tokenize(inference_pb2.TokenizeRequest(prompt="x", model="nothing")),
        router.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1], model="nothing")),
    ):
        assert (await refused(question)).code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.asyncio(loop_scope="module")
async def test_the_gateway_lists_and_serves_all_models(pair: Pair) -> None:
    router, workers = pair
    async with aiohttp.ClientSession() as session:
        url = f"http://{router.server.http_address}/v1"
        before = {each: len(worker.submits) for each, worker in workers.items()}
        listed = await (await session.get(f"{url}/models")).json()
        assert [model["id"] for model in listed["data"]] == ["demo", "other", "alias"]
        assert (await (await session.get(f"{url}/models/alias")).json())["id"] == "other"
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": "other"}
        async with session.post(f"{url}/chat/completions", json=body) as answer:
            assert (answer.status, (await answer.json())["model"]) == (200, "other")
        assert [len(worker.submits) for worker in workers.values()] == [before["demo"], before["other"] + 1]
        async with session.post(f"{url}/chat/completions", json=body | {"model": "nothing"}) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "model_not_found"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_is_one_models_and_a_name_that_a_model_has_means_the_model(pair: Pair) -> None:
    router, workers = pair
    registry = groups(router).default.parts.adapters.registry
    for name in ("sql", "other"):
        registry.apply(Change(name, RegisteredAdapter(name=name, fingerprint=name, path="x")))
    names = [(one.id, one.parent) for one in (await router.inference.ListModels(LIST)).models]
    assert names == [("demo", ""), ("sql", "demo"), ("other", ""), ("alias", "")]
    await ask(router, "other")
    assert workers["other"].submits[-1].lora_name == ""
    for adapter, model in (("sql", "other"), ("other", "alias"), ("other", "sql")):
        error = await refused(ask(router, model, lora_name=adapter))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        question = cluster_pb2.ExplainPlacementRequest(prompt="x", model=model, lora_name=adapter)
        error = await refused(router.cluster.ExplainPlacement(question))
        assert error.code() is grpc.StatusCode.NOT_FOUND
    registry.apply(Change("sql", None), Change("other", None))


@pytest.mark.asyncio(loop_scope="module")
async def test_operators_see_the_model_of_workers_requests_and_metrics(pair: Pair) -> None:
    router, _ = pair
    before = {
        group.model.id: sum(group.parts.metrics.readings()["requests"].values()) for group in groups(router)
    }
    listed = await router.cluster.ListWorkers(cluster_pb2.ListWorkersRequest())
    assert {worker.worker_id: worker.model for worker in listed.workers} == {
        "demo-worker": "demo",
        "other-worker": "other",
    }
    running = asyncio.ensure_future(ask(router, "other", sampling=FOREVER))
    await until(router.requests)
    assert [one.model for one in await router.requests()] == ["other"]
    info = await router.cluster.GetClusterInfo(cluster_pb2.GetClusterInfoRequest())
    assert (info.model.id, [model.id for model in info.models]) == ("demo", ["demo", "other"])
    assert info.workers_ready == 2
    await running
    expected = {"demo": before["demo"], "other": before["other"] + 1}
    await until(
        lambda: (
            expected
            == {
                labels["model_name"]: sum(readings["requests"].values())
                for labels, readings in router.server.model_readings
            }
        )
    )


async def test_workers_of_one_model_dead_leave_the_other_alone() -> None:
    async with served(OTHER, no_worker_seconds=0.0) as (router, workers):
        await workers["other"].__aexit__(None, None, None)
        router.server.set_workers([], "other")
        await until(lambda: router.server.num_ready_workers == 1)
        assert (await refused(ask(router, "other"))).code() is grpc.StatusCode.UNAVAILABLE
        assert list((await ask(router, "demo")).token_ids) == expected_tokens(1, 20)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_of_another_model_is_refused(pair: Pair) -> None:
    router, workers = pair
    before = len(workers["other"].submits)
    router.server.set_workers([workers["demo"].address, workers["other"].address])

    async def is_refused() -> bool:
        listed = await router.cluster.ListWorkers(cluster_pb2.ListWorkersRequest())
        reasons = [worker.state_reason for worker in listed.workers if worker.model == "demo"]
        return "serves model other, and this address is one of the cluster's first model" in reasons

    await until(is_refused)
    assert list((await ask(router, "demo")).token_ids) == expected_tokens(1, 20)
    assert len(workers["other"].submits) == before
    router.server.set_workers([workers["demo"].address])


def has_submits(worker: FakeWorker, number: int) -> bool:
    return len(worker.submits) >= number


@pytest.mark.parametrize("goes", ["other", "demo"])
async def test_models_come_and_go_under_load_without_a_failed_request(goes: str) -> None:
    async with served(OTHER) as (router, workers):
        stays, kept = ("demo", DEMO) if goes == "other" else ("alias", OTHER)
        stopping, num_answered = asyncio.Event(), 0

        async def load() -> None:
            nonlocal num_answered
            while not stopping.is_set():
                assert list((await ask(router, stays)).token_ids) == expected_tokens(1, 20)
                num_answered += 1

        loads = [asyncio.ensure_future(load()) for _ in range(3)]
        names = ["other"] if goes == "other" else ["demo", None]
        long = [asyncio.ensure_future(ask(router, name, sampling={"max_tokens": 60})) for name in names]
        # Nothing but these requests comes to the worker.
        await until(partial(has_submits, workers[goes], len(long)))
        await router.server.set_models((kept,), grace_seconds=60.0)
        # What runs has ended whole, a new request finds no such model, and one without a name has the one that stays.
        assert [list((await one).token_ids) for one in long] == [expected_tokens(1, 60)] * len(long)
        assert (await refused(ask(router, goes))).code() is grpc.StatusCode.NOT_FOUND
        assert list((await ask(router, None)).token_ids) == expected_tokens(1, 20)
        assert len(workers[goes].submits) == len(long)
        before = num_answered
        await until(lambda: num_answered > before + 5)
        if goes == "other":
            router.server.set_workers([workers["other"].address], "other")
            await router.server.set_models((DEMO, OTHER), grace_seconds=5.0)
            assert router.server.model_ids == ("demo", "other")
            assert list((await ask(router, "other")).token_ids) == expected_tokens(1, 20)
        stopping.set()
        await asyncio.gather(*loads)


async def test_calls_that_outlive_the_grace_period_of_their_model_get_an_error(caplog, monkeypatch):
    monkeypatch.setattr(interceptor, "END_SECONDS", 0.2)
    async with served(OTHER) as (router, workers):
        workers["other"].script = lambda submit: Script(hang_after=1)
        running = asyncio.ensure_future(ask(router, "other", sampling=FOREVER))
        await until(partial(has_submits, workers["other"], 1))
        await router.server.set_models((DEMO,), grace_seconds=0.1)
        async with asyncio.timeout(20):
            assert (await refused(running)).code() is grpc.StatusCode.UNAVAILABLE
        assert "model other: calls still run after 0.1 s, and get an error" in caplog.messages
        await ask(router, "demo")


async def test_a_model_that_was_added_again_is_built_again_and_running_calls_end_on_the_old_one() -> None:
    async with served(OTHER) as (router, workers):
        before = groups(router).of("other")
        running = asyncio.ensure_future(ask(router, "other", sampling={"max_tokens": 60}))
        await until(partial(has_submits, workers["other"], 1), seconds=30.0)
        again = replace(OTHER, addition="second")
        await router.server.set_models((DEMO, again), grace_seconds=60.0)
        assert groups(router).of("other") is not before
        assert router.server.models == (DEMO, again)
        assert list((await running).token_ids) == expected_tokens(1, 60)
        assert list((await ask(router, "other")).token_ids) == expected_tokens(1, 20)
        same = groups(router).of("other")
        await router.server.set_models((DEMO, again), grace_seconds=60.0)
        assert groups(router).of("other") is same, "nothing has changed"


async def test_a_model_that_cannot_be_read_is_refused_and_the_others_stay_in_the_supervisors_order() -> None:
    broken = ServedModel(model="/nowhere", names=("broken",), index="broken")
    async with served() as (router, _):
        with pytest.raises(ValueError, match="/nowhere"):
            await router.server.set_models((broken,), grace_seconds=1.0)
        assert router.server.model_ids == ("demo",), "the last one stays"
        with pytest.raises(ValueError, match="/nowhere"):
            await router.server.set_models((OTHER, DEMO, broken), grace_seconds=1.0)
        assert router.server.model_ids == ("other", "demo")
        assert "/nowhere" in router.server.refused["broken"]
        await router.server.set_models((OTHER,), grace_seconds=1.0)
        assert (router.server.model_ids, router.server.refused) == (("other",), {})


async def test_each_model_has_a_log_of_adapters_and_one_that_was_added_again_another_one() -> None:
    config = RouterConfig(model=str(MODEL), redis_url="redis://127.0.0.1:1", cluster_secret="0" * 32)
    models = (DEMO, OTHER, replace(OTHER, addition="second"))
    async with AsyncExitStack() as stack:
        shared = build_shared(config, stack)
        logs = [adapter_log(shared, model) for model in (*models, OTHER)]
        keys = [log._place.key for log in logs if log is not None]
        assert len(set(keys)) == len(models)
        assert keys[1] == keys[3]
        group = await build_group(shared, OTHER, stack)
        assert group.parts.adapters._log is not None
        assert group.parts.adapters._log._place.key == keys[1]
        without_redis = build_shared(RouterConfig(model=str(MODEL)), stack)
        assert adapter_log(without_redis, OTHER) is None


def test_a_model_that_cannot_be_served_is_tried_again_at_longer_intervals_and_logged_once(caplog):
    seconds = 0.0
    attempts = Attempts(lambda: seconds)
    models = (DEMO, OTHER)
    assert attempts.is_due(models)
    tried_at = []
    while seconds < 600.0:
        if attempts.is_due(models):
            tried_at.append(seconds)
            attempts.failed(models, ValueError("no such folder"))
        seconds += 1.0
    pauses = [after - before for before, after in pairwise(tried_at)]
    assert pauses == [4.0, 8.0, 16.0, 32.0, 64.0, 120.0, 120.0, 120.0]
    assert len(caplog.records) == 1
    assert attempts.is_due((OTHER,)), "a change of the models is tried at once"
    attempts.failed(models, ValueError("another reason"))
    assert len(caplog.records) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_a_burst_for_one_model_leaves_the_other_its_part_of_the_limits(pair: Pair) -> None:
    router, workers = pair
    workers["demo"].script = lambda submit: Script(hang_after=1)
    burst = [asyncio.ensure_future(ask(router, "demo", sampling=FOREVER)) for _ in range(12)]
    await until(lambda: sum(one.done() for one in burst) >= 8)
    refusals = [one.exception() for one in burst if one.done()]
    assert all(
        isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for error in refusals
    )
    assert list((await ask(router, "other")).token_ids) == expected_tokens(1, 20)
    for one in burst:
        one.cancel()
    await asyncio.gather(*burst, return_exceptions=True)
    workers["demo"].script = lambda submit: Script()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_drain_is_refused_for_the_last_worker_of_a_model(pair: Pair) -> None:
    router, _ = pair
    admin = AdminServiceStub(router.channel)
    error = await refused(admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="other-worker")))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_two_models_cannot_share_a_name_or_an_index() -> None:
    twin = ServedModel(model="b", names=("x", "a"), index="b")
    with pytest.raises(ValueError, match="'a'"):
        RouterConfig(model="a", further_models=(twin,))
    with pytest.raises(ValueError, match="index"):
        RouterConfig(model="a", further_models=(ServedModel(model="b", names=("b",)),))


def test_the_config_keeps_its_models_in_order() -> None:
    config = RouterConfig(model="a", further_models=(OTHER,))
    assert [model.id for model in config.models] == ["a", "other"]
    assert config.with_models(config.models[::-1]).models == config.models[::-1]
