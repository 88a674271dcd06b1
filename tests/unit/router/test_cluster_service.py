"""ClusterService over real gRPC: the router's view of the cluster, and the workers' own reports."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.index.contract import Batch, Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.naming.block_hash import split_names
from blockyard.proto.v1 import cluster_pb2

from .fake_worker import FakeWorker, signed
from .rig import (
    Router,
    fields_of,
    reason_of,
    request,
    running_router,
    until,
    waiting_for_redis,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "import os\n" * 80


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def index(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, RedisPrefixIndex]]:
    redis = start_private_redis(tmp_path_factory.mktemp("redis"))
    try:
        async with connect(redis.url, timeout_seconds=5.0) as client:
            yield redis.url, RedisPrefixIndex(client, "default")
    finally:
        redis.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(index: tuple[str, RedisPrefixIndex]) -> AsyncIterator[Router]:
    with waiting_for_redis():
        async with running_router(redis_url=index[0], policy="prefix") as running:
            yield running


async def register(index: RedisPrefixIndex, worker: FakeWorker, worker_id: str) -> Any:
    record = WorkerRecord(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(f"{worker_id}-life-1"),
        address=worker.address,
        fingerprint="model",
        block_size=16,
    )
    return await index.register(signed(record), lease_seconds=30.0, has_host_cache=True)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.ci
async def test_workers_are_learned_from_the_index_and_remembered(
    router: Router, index: tuple[str, RedisPrefixIndex]
) -> None:
    async with worker_of_model("from-redis") as worker:
        berth = await register(index[1], worker, "from-redis")
        await until(lambda: _is_ready(router, worker), seconds=10)
        await index[1].retire(berth)
        await asyncio.sleep(1.5)
        assert await _is_ready(router, worker), "a worker that still talks is kept without the index"
    await until(lambda: _is_forgotten(router), seconds=10)


async def _is_ready(router: Router, worker: FakeWorker) -> bool:
    return (await router.states()).get(worker.address) == cluster_pb2.WORKER_STATE_READY


async def _is_forgotten(router: Router) -> bool:
    return await router.states() == {}


async def test_a_prefix_in_the_index_draws_its_prompt(
    router: Router, index: tuple[str, RedisPrefixIndex]
) -> None:
    async with router.workers(worker_of_model("a"), worker_of_model("b")) as workers:
        await router.inference.Generate(request(PROMPT))
        submit = next(submit for worker in workers for submit in worker.submits)
        names = split_names(submit.block_names)[1:]
        berth = await register(index[1], workers[1], "b")
        batch = Batch(sequence=1, added=tuple(names[:8]), anywhere_added=tuple(names[:11]))
        await index[1].apply(berth, batch)
        workers[1].load.host_tokens_per_second = 24_000.0
        await asyncio.sleep(1.1)  # what the router placed itself has faded
        found = await router.cluster.LookupPrefix(cluster_pb2.LookupPrefixRequest(prompt=PROMPT))
        assert found.index_available
        holders = [(h.worker_id, h.cached_blocks, h.host_cached_blocks) for h in found.holders]
        assert holders == [("b", 8, 3)]
        assert (found.prompt_tokens, found.prompt_blocks) == (submit.prompt_tokens, len(names))
        assert list(found.block_names) == names
        explained = await router.cluster.ExplainPlacement(cluster_pb2.ExplainPlacementRequest(prompt=PROMPT))
        assert (explained.policy, explained.chosen_worker_id) == ("prefix", "b")
        first, second = explained.candidates
        assert (first.worker_id, first.cached_tokens, second.cached_tokens) == ("b", 128, 0)
        assert (first.host_cached_tokens, first.host_load_ms) == (48, pytest.approx(2.0))
        assert first.uncached_tokens == submit.prompt_tokens - 128 - 48
        for terms in explained.candidates:
            parts = terms.queue_ms + terms.prefill_ms + terms.host_load_ms + terms.decode_ms + terms.memory_ms
            assert terms.total_ms == pytest.approx(parts + terms.interference_ms)
        await router.inference.Generate(request(PROMPT))
        assert workers[1].submits[-1].block_names == submit.block_names
        other = cluster_pb2.LookupPrefixRequest(prompt=PROMPT, cache_salt="other-tenant")
        assert list((await router.cluster.LookupPrefix(other)).holders) == []
        await index[1].retire(berth)


async def test_the_list_says_who_is_there_and_why_not(router: Router) -> None:
    other = FakeWorker("other", tokenizer_fingerprint="not-this-one", device="cpu")
    async with router.workers(worker_of_model("a", device="cuda:0", engine="model")) as (worker,), other:
        router.server.set_workers([worker.address, other.address])
        await until(lambda: _has_two(router))
        listed = (await router.cluster.ListWorkers(cluster_pb2.ListWorkersRequest())).workers
        assert [(w.worker_id, w.state) for w in listed] == [
            ("a", cluster_pb2.WORKER_STATE_READY),
            ("other", cluster_pb2.WORKER_STATE_REFUSED),
        ]
        assert (listed[0].device, listed[0].total_blocks, listed[0].block_size) == ("cuda:0", 1000, 16)
        assert listed[0].seconds_since_heard < 1.0
        assert "tokenizer" in listed[1].state_reason
        info = await router.cluster.GetClusterInfo(cluster_pb2.GetClusterInfoRequest())
        assert (info.workers_ready, info.workers_known, info.model.id) == (1, 2, "demo")
        assert info.index_available
        router.server.set_workers([worker.address])


async def test_the_second_of_two_workers_of_one_name_is_refused_in_words_until_the_first_has_gone(
    router: Router,
) -> None:
    second = worker_of_model("a", incarnation="another-life")
    async with router.workers(worker_of_model("a")) as (first,), second:
        router.server.set_workers([first.address, second.address])
        await until(lambda: _has_two(router))
        listed = (await router.cluster.ListWorkers(cluster_pb2.ListWorkersRequest())).workers
        (refused,) = (worker for worker in listed if worker.state == cluster_pb2.WORKER_STATE_REFUSED)
        assert refused.address == second.address
        assert f"worker id a is already in use at {first.address}" in refused.state_reason
        await router.inference.Generate(request())
        assert second.submits == []
        await first.kill()
        router.server.set_workers([second.address])
        await until(lambda: _is_ready_alone(router, second.address), seconds=30)
        await router.inference.Generate(request())
        assert len(second.submits) == 1
        router.server.set_workers([])


async def _is_ready_alone(router: Router, address: str) -> bool:
    return await router.states() == {address: cluster_pb2.WORKER_STATE_READY}


async def _has_two(router: Router) -> bool:
    return sorted((await router.states()).values()) == [
        cluster_pb2.WORKER_STATE_READY,
        cluster_pb2.WORKER_STATE_REFUSED,
    ]


@pytest.mark.ci
async def test_a_watch_tells_of_each_change(router: Router) -> None:
    watch = router.cluster.WatchWorkers(cluster_pb2.WatchWorkersRequest())
    messages = aiter(watch)
    assert list((await anext(messages)).workers) == []
    async with router.workers(worker_of_model("a")) as (worker,):
        states = set()
        while cluster_pb2.WORKER_STATE_READY not in states:
            states = {w.state for w in (await anext(messages)).workers}
        worker.hang()
        while cluster_pb2.WORKER_STATE_SUSPECT not in states:
            states = {w.state for w in (await anext(messages)).workers}
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


@pytest.mark.parametrize(
    ("method", "message", "code", "what"),
    [
        ("GetBlockPool", cluster_pb2.GetBlockPoolRequest(), grpc.StatusCode.INVALID_ARGUMENT, "worker_id"),
        (
            "GetBlockPool",
            cluster_pb2.GetBlockPoolRequest(worker_id="x"),
            grpc.StatusCode.NOT_FOUND,
            "WORKER_NOT_FOUND",
        ),
        (
            "ListBlocks",
            cluster_pb2.ListBlocksRequest(worker_id="a", page_size=10**9),
            grpc.StatusCode.INVALID_ARGUMENT,
            "page_size",
        ),
        (
            "ListBlocks",
            cluster_pb2.ListBlocksRequest(worker_id="a", page_token="forged"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "page_token",
        ),
        (
            "FindBlocks",
            cluster_pb2.FindBlocksRequest(worker_id="a", block_ids=range(1001)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "block_ids",
        ),
        (
            "FindBlocks",
            cluster_pb2.FindBlocksRequest(worker_id="a", names=[b"short"]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "names",
        ),
        (
            "ListSequences",
            cluster_pb2.ListSequencesRequest(worker_id="a", page_size=1001),
            grpc.StatusCode.INVALID_ARGUMENT,
            "page_size",
        ),
        ("LookupPrefix", cluster_pb2.LookupPrefixRequest(), grpc.StatusCode.INVALID_ARGUMENT, "input"),
        (
            "ExplainPlacement",
            cluster_pb2.ExplainPlacementRequest(prompt="x", cache_salt="a/b"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "cache_salt",
        ),
    ],
)
async def test_a_bad_question_gets_its_code(
    router: Router, method: str, message: Any, code: grpc.StatusCode, what: str
) -> None:
    async with router.workers(worker_of_model("a")):
        error = await refused(getattr(router.cluster, method)(message))
    assert error.code() is code
    assert what in (*fields_of(error), reason_of(error))


async def test_a_lost_workers_pool_is_unreachable_rather_than_unknown(router: Router) -> None:
    async with router.workers(worker_of_model("a")) as (worker,):
        await worker.kill()
        question = cluster_pb2.GetBlockPoolRequest(worker_id="a")
        await until(lambda: _is_lost(router))
        error = await refused(router.cluster.GetBlockPool(question))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "WORKER_UNREACHABLE")


async def _is_lost(router: Router) -> bool:
    return list((await router.states()).values()) == [cluster_pb2.WORKER_STATE_LOST]


async def cluster_info(router: Router) -> cluster_pb2.ClusterInfo:
    return await router.cluster.GetClusterInfo(cluster_pb2.GetClusterInfoRequest())


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
        await until(lambda: _is_idle(router))


async def _is_idle(router: Router) -> bool:
    return await router.requests() == []
