"""ClusterService over real gRPC: the router's view of the cluster, and the workers' own reports."""

import asyncio

import grpc
import pytest
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.services import interceptor

from .fake_worker import FakeWorker
from .rig import (
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

READY, REFUSED = cluster_pb2.WORKER_STATE_READY, cluster_pb2.WORKER_STATE_REFUSED
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_list_says_who_is_there_and_why_not(router: Router) -> None:
    other = FakeWorker("other", tokenizer_fingerprint="not-this-one", device="cpu")
    async with router.workers(worker_of_model("a", device="cuda:0", engine="model")) as (worker,), other:
        router.server.set_workers([worker.address, other.address])
        await until(lambda: has_states(router, READY, REFUSED))
        listed = (await router.cluster.ListWorkers(cluster_pb2.ListWorkersRequest())).workers
        assert [(w.worker_id, w.state) for w in listed] == [("a", READY), ("other", REFUSED)]
        assert (listed[0].device, listed[0].total_blocks, listed[0].block_size) == ("cuda:0", 1000, 16)
        assert listed[0].seconds_since_heard < 1.0
        assert "tokenizer" in listed[1].state_reason
        info = await cluster_info(router)
        assert (info.workers_ready, info.workers_known, info.model.id) == (1, 2, "demo")
        router.server.set_workers([worker.address])


async def has_states(router: Router, *states: int) -> bool:
    return sorted((await router.states()).values()) == [*states]


async def cluster_info(router: Router) -> cluster_pb2.ClusterInfo:
    return await router.cluster.GetClusterInfo(cluster_pb2.GetClusterInfoRequest())


async def test_the_second_of_two_workers_of_one_name_is_refused_in_words_until_the_first_has_gone(router):
    second = worker_of_model("a", incarnation="another-life")
    async with router.workers(worker_of_model("a")) as (first,), second:
        router.server.set_workers([first.address, second.address])
        await until(lambda: has_states(router, READY, REFUSED))
        listed = (await router.cluster.ListWorkers(cluster_pb2.ListWorkersRequest())).workers
        (other,) = (worker for worker in listed if worker.state == REFUSED)
        assert other.address == second.address
        assert f"worker id a is already in use at {first.address}" in other.state_reason
        await router.inference.Generate(request())
        assert second.submits == []
        await first.kill()
        router.server.set_workers([second.address])
        await until(lambda: has_states(router, READY))
        await router.inference.Generate(request())
        assert len(second.submits) == 1
        router.server.set_workers([])


async def test_a_watch_tells_of_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "END_SECONDS", 0.2)
    async with running_router(suspect_seconds=0.5, lost_seconds=2.0) as router:
        watch = router.cluster.WatchWorkers(cluster_pb2.WatchWorkersRequest())
        messages = aiter(watch)
        assert list((await anext(messages)).workers) == []

        async def seen(state: int) -> None:
            while state not in {w.state for w in (await anext(messages)).workers}:
                pass

        async with router.workers(worker_of_model("a")) as (worker,), asyncio.timeout(60):
            await seen(READY)
            worker.hang()
            await seen(cluster_pb2.WORKER_STATE_SUSPECT)
        watch.cancel()


async def test_pools_are_asked_of_the_worker_itself(router: Router) -> None:
    async with router.workers(worker_of_model("a")):
        pool = await router.cluster.GetBlockPool(cluster_pb2.GetBlockPoolRequest(worker_id="a"))
        assert (pool.worker_id, pool.total_blocks) == ("a", 7)
        page = await router.cluster.ListBlocks(cluster_pb2.ListBlocksRequest(worker_id="a"))
        again = cluster_pb2.ListBlocksRequest(worker_id="a", page_token=page.next_page_token)
        assert await router.cluster.ListBlocks(again)
        found = await router.cluster.FindBlocks(cluster_pb2.FindBlocksRequest(worker_id="a", block_ids=[3]))
        assert [block.block_id for block in found.blocks] == [3]
        listed = await router.cluster.ListSequences(cluster_pb2.ListSequencesRequest(worker_id="a"))
        assert [sequence.sequence_id for sequence in listed.sequences] == [5]


BAD_QUESTIONS = [
    ("GetBlockPool", {"worker_id": ""}, "worker_id"),
    ("ListBlocks", {"worker_id": "a", "page_size": 10**9}, "page_size"),
    ("ListBlocks", {"worker_id": "a", "page_token": "forged"}, "page_token"),
    ("FindBlocks", {"worker_id": "a", "block_ids": range(1001)}, "block_ids"),
    ("FindBlocks", {"worker_id": "a", "names": [b"short"]}, "names"),
    ("ListSequences", {"worker_id": "a", "page_size": 1001}, "page_size"),
    ("LookupPrefix", {}, "input"),
    ("ExplainPlacement", {"prompt": "x", "cache_salt": "a/b"}, "cache_salt"),
]


async def test_a_bad_question_names_its_field_and_a_worker_that_is_not_there_is_told_apart(router: Router):
    async with router.workers(worker_of_model("a")) as (worker,):
        for method, fields, field in BAD_QUESTIONS:
            error = await refused(
                getattr(router.cluster, method)(getattr(cluster_pb2, f"{method}Request")(**fields))
            )
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field in (*fields_of(error), reason_of(error))
        error = await refused(router.cluster.GetBlockPool(cluster_pb2.GetBlockPoolRequest(worker_id="x")))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "WORKER_NOT_FOUND")
        await worker.kill()
        await until(lambda: has_states(router, cluster_pb2.WORKER_STATE_LOST))
        error = await refused(router.cluster.GetBlockPool(cluster_pb2.GetBlockPoolRequest(worker_id="a")))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "WORKER_UNREACHABLE")


async def test_running_requests_are_listed_with_their_progress(router: Router) -> None:
    before = sum((await cluster_info(router)).first_token.cumulative[-1:])
    async with router.workers(worker_of_model("a")):
        stream = router.inference.GenerateStream(request(request_id="long", sampling={"max_tokens": 400}))
        await anext(aiter(stream))
        (listed,) = await router.requests()
        assert (listed.request_id, listed.worker_id) == ("long", "a")
        assert listed.state == cluster_pb2.REQUEST_STATE_STREAMING
        assert listed.prompt_tokens > 0
        assert listed.generated_tokens > 0
        assert listed.HasField("cached_tokens")
        info = await cluster_info(router)
        assert info.first_token.cumulative[-1] == before + 1
        assert len(info.inter_token.cumulative) == len(info.inter_token.bounds_seconds) + 1
        stream.cancel()
        await until(lambda: is_idle(router))
