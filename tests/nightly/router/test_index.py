"""The prefix index in a real Redis, as a router reads it: who serves, and who has a prompt's blocks."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from blockyard.deploy.machine.redis_server import RedisProcess
from blockyard.proto.index.contract import Batch, Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.naming.block_hash import split_names
from blockyard.proto.v1 import cluster_pb2

from tests.unit.router.fake_worker import FakeWorker, signed
from tests.unit.router.rig import Router, request, running_router, until, waiting_for_redis, worker_of_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "import os\n" * 80


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def index(server: RedisProcess) -> AsyncIterator[tuple[str, RedisPrefixIndex]]:
    async with connect(server.url, timeout_seconds=5.0) as client:
        yield server.url, RedisPrefixIndex(client, "default")


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


async def test_workers_are_learned_from_the_index_and_remembered(router, index):
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


async def test_a_prefix_in_the_index_draws_its_prompt(router: Router, index: tuple[str, RedisPrefixIndex]):
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
