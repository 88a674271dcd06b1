"""AdminService: which worker each call reaches, which calls are refused, how long they take, and the audit log."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2, session_pb2
from blockyard.proto.v1.admin_pb2_grpc import AdminServiceStub
from blockyard.router.client import Client
from blockyard.router.client.aio import AsyncClient
from blockyard.router.client.errors import NotFoundError

from .fake_worker import Script, expected_tokens
from .rig import (
    FOREVER,
    SOON_LOST,
    Router,
    fields_of,
    is_idle,
    reason_of,
    refused,
    request,
    running_router,
    until,
    worker_of_model,
)

DRAINING, READY = cluster_pb2.WORKER_STATE_DRAINING, cluster_pb2.WORKER_STATE_READY
NAMED = {
    "DrainWorker": admin_pb2.DrainWorkerRequest,
    "ResumeWorker": admin_pb2.ResumeWorkerRequest,
    "FlushCache": admin_pb2.FlushCacheRequest,
    "RebuildIndex": admin_pb2.RebuildIndexRequest,
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[Router]:
    async with running_router() as running:
        yield running


def admin(router: Router) -> Any:
    return AdminServiceStub(router.channel)  # type: ignore[no-untyped-call]


def drain(router: Router, worker_id: str = "a", *, timeout: float | None = None, **fields: Any) -> Any:
    return admin(router).DrainWorker(
        admin_pb2.DrainWorkerRequest(worker_id=worker_id, **fields), timeout=timeout
    )


async def is_in(router: Router, address: str, state: int) -> bool:
    return (await router.states()).get(address) == state


async def test_a_drain_goes_to_its_worker_alone_and_every_router_sees_its_state(router: Router) -> None:
    async with (
        running_router() as other,
        router.workers(worker_of_model("a"), worker_of_model("b")) as (a, b),
    ):
        other.server.set_workers([a.address])
        await until(lambda: is_in(other, a.address, READY))
        assert (await drain(router, grace_seconds=2.5)).moved == 3
        assert (len(a.admin_calls), len(b.admin_calls)) == (1, 0)
        assert a.admin_calls[0].grace_seconds == 2.5
        for one in (router, other):
            await until(lambda one=one: is_in(one, a.address, DRAINING))
        await router.inference.Generate(request())
        assert (len(a.submits), len(b.submits)) == (0, 1)
        await admin(other).ResumeWorker(admin_pb2.ResumeWorkerRequest(worker_id="a"))
        await until(lambda: is_in(router, a.address, READY))


async def test_a_request_that_a_draining_worker_gives_back_goes_on_elsewhere(router: Router) -> None:
    draining = session_pb2.REJECT_REASON_DRAINING
    async with router.workers(worker_of_model("a")) as (a,):
        a.script = lambda submit: Script(reject=draining if len(a.submits) == 1 else None)
        running = asyncio.ensure_future(router.inference.Generate(request()))
        await until(lambda: len(a.submits) == 1)
        await until(lambda: is_in(router, a.address, DRAINING))
        assert not running.done()
        a.tell_draining(False)
        assert list((await running).token_ids) == expected_tokens(1, 20)


@pytest.mark.parametrize("method", NAMED)
async def test_a_worker_id_that_is_none_is_refused_by_its_field_and_an_unknown_worker_not_found(
    router: Router, method: str
) -> None:
    call = getattr(admin(router), method)
    for worker_id in ("", "x" * 129, "a\nb", "../a", "a*", "ä"):
        error = await refused(call(NAMED[method](worker_id=worker_id)))
        assert (error.code(), fields_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["worker_id"])
        assert worker_id == "" or worker_id not in str(error.details())
    error = await refused(call(NAMED[method](worker_id="nobody")))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "WORKER_NOT_FOUND")


async def test_a_grace_that_makes_no_sense_is_refused_by_its_field(router: Router) -> None:
    async with router.workers(worker_of_model("a")) as (a,):
        for grace_seconds in (-0.1, 86_401.0, float("nan"), float("inf")):
            error = await refused(drain(router, grace_seconds=grace_seconds))
            assert (error.code(), fields_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["grace_seconds"])
        assert a.admin_calls == []


async def test_without_a_name_all_that_are_connected_are_asked_and_their_answers_added(router: Router):
    async with router.workers(worker_of_model("a"), worker_of_model("b")) as (a, b):
        flushed = await admin(router).FlushCache(admin_pb2.FlushCacheRequest())
        assert (flushed.flushed_blocks, flushed.flushed_host_blocks) == (20, 2)
        assert (await admin(router).RebuildIndex(admin_pb2.RebuildIndexRequest())).workers == 2
        flushed = await admin(router).FlushCache(admin_pb2.FlushCacheRequest(worker_id="b"))
        assert flushed.flushed_blocks == 10
        assert (len(a.admin_calls), len(b.admin_calls)) == (2, 3)
        b.admin_failure = grpc.StatusCode.INTERNAL
        error = await refused(admin(router).FlushCache(admin_pb2.FlushCacheRequest()))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "WORKER_UNREACHABLE")
        assert error.details() == "1 of 2 workers did not answer"
        assert len(a.admin_calls) == 3
    assert (await admin(router).FlushCache(admin_pb2.FlushCacheRequest())).flushed_blocks == 0


async def test_a_workers_refusal_comes_in_words_of_ours(router: Router) -> None:
    unavailable = (grpc.StatusCode.UNAVAILABLE, "WORKER_UNREACHABLE")
    async with router.workers(worker_of_model("a")) as (a,):
        for failure, expected in (
            (grpc.StatusCode.ABORTED, (grpc.StatusCode.CANCELLED, "ABORTED")),
            (grpc.StatusCode.UNIMPLEMENTED, unavailable),
            (grpc.StatusCode.INTERNAL, unavailable),
        ):
            a.admin_failure = failure
            error = await refused(drain(router, force=True))
            assert (error.code(), reason_of(error)) == expected
            assert "own business" not in str(error.details())


async def test_a_drain_lasts_as_long_as_its_client_waits_and_no_longer(router: Router) -> None:
    async with router.workers(worker_of_model("a")) as (a,):
        a.drain_ends = asyncio.Event()
        error = await refused(drain(router, force=True, timeout=0.5))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: a.cancelled_drains == 1)
        assert await is_in(router, a.address, DRAINING), "the worker says itself when it is over"
        waiting = asyncio.ensure_future(drain(router, force=True, timeout=30))
        await until(lambda: len(a.admin_calls) == 2)
        a.drain_ends.set()
        assert (await waiting).moved == 3


async def test_a_call_to_a_worker_that_is_lost_meanwhile_ends_with_its_connection() -> None:
    async with running_router(**SOON_LOST) as router, router.workers(worker_of_model("a")) as (a,):
        a.drain_ends = asyncio.Event()
        waiting = asyncio.ensure_future(refused(drain(router, force=True, timeout=30)))
        await until(lambda: len(a.admin_calls) == 1)
        a.hang()
        async with asyncio.timeout(15):
            assert (await waiting).code() is grpc.StatusCode.UNAVAILABLE


async def test_an_admin_aborts_whosever_request_it_is(router: Router) -> None:
    async with router.workers(worker_of_model("a")):
        wanted = request(request_id="victim", sampling=FOREVER)
        call = router.inference.Generate(wanted, metadata=(("blockyard-tenant", "somebody"),))
        running = asyncio.ensure_future(refused(call))
        await until(lambda: is_known(router, "victim"))
        await admin(router).Abort(inference_pb2.AbortRequest(request_id="victim"))
        error = await running
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.CANCELLED, "ABORTED")
        await until(lambda: is_idle(router))
        error = await refused(admin(router).Abort(inference_pb2.AbortRequest(request_id="victim")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        for bad in ("", "a\nb", "x" * 129):
            error = await refused(admin(router).Abort(inference_pb2.AbortRequest(request_id=bad)))
            assert (error.code(), fields_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["request_id"])


async def test_the_last_worker_that_takes_requests_is_drained_by_force_alone(router: Router) -> None:
    async with router.workers(worker_of_model("a"), worker_of_model("b")) as (a, b):
        await drain(router)
        await until(lambda: is_in(router, a.address, DRAINING))
        await drain(router)
        error = await refused(drain(router, "b"))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "LAST_WORKER")
        assert "force" in str(error.details())
        assert b.admin_calls == []
        await drain(router, "b", force=True)
        await until(lambda: is_in(router, b.address, DRAINING))


async def is_known(router: Router, request_id: str) -> bool:
    return request_id in {known.request_id for known in await router.requests()}


async def test_each_call_that_changes_something_leaves_a_line_and_no_other(router, caplog):
    stub = admin(router)
    with caplog.at_level(logging.INFO, logger="blockyard.audit"):
        async with router.workers(worker_of_model("a")):
            await stub.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="a", grace_seconds=1, force=True))
            await stub.ResumeWorker(admin_pb2.ResumeWorkerRequest(worker_id="a"))
            await stub.FlushCache(admin_pb2.FlushCacheRequest())
            await stub.RebuildIndex(admin_pb2.RebuildIndexRequest(worker_id="a"))
            await refused(stub.Abort(inference_pb2.AbortRequest(request_id="r-1")))
            await refused(stub.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="a\nforged line")))
    lines = [record.getMessage() for record in caplog.records if record.name == "blockyard.audit"]
    assert lines == [
        "DrainWorker a grace_seconds=1 force by anonymous",
        "ResumeWorker a by anonymous",
        "FlushCache all 1 workers by anonymous",
        "RebuildIndex a by anonymous",
        "Abort r-1 by anonymous",
    ]


async def test_both_clients_make_every_call(router: Router) -> None:
    async with router.workers(worker_of_model("a")) as (a,):
        async with AsyncClient(router.address) as client:
            assert await client.drain_worker("a", grace_seconds=0.5, force=True) == 3
            await client.resume_worker("a")
            assert (await client.flush_cache()).flushed_blocks == 10
            assert await client.rebuild_index("a") == 1
            with pytest.raises(NotFoundError):
                await client.abort_any("nobodys")
        assert await asyncio.to_thread(calls_of_the_sync_client, router.address) == (3, 10, 1)
        assert len(a.admin_calls) == 8
        assert [call.grace_seconds for call in a.admin_calls[::4]] == [0.5, 30.0]


def calls_of_the_sync_client(address: str) -> tuple[int, int, int]:
    with Client(address) as client:
        moved = client.drain_worker("a", force=True)
        client.resume_worker("a")
        flushed, rebuilt = client.flush_cache("a").flushed_blocks, client.rebuild_index()
        with pytest.raises(NotFoundError):
            client.abort_any("nobodys")
        return moved, flushed, rebuilt
