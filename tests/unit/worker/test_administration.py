"""An operator's actions on a worker's cache and on its part of the index, and a worker's start and stop."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace

import pytest
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.naming.block_hash import chain
from blockyard.proto.v1.admin_pb2 import (
    DrainWorkerRequest,
    FlushCacheRequest,
    FlushCacheResponse,
    RebuildIndexRequest,
    ResumeWorkerRequest,
)
from blockyard.worker.server import WorkerServer

from .serving import KV_BYTES, ROOT, Session, engine_settings, in_engine, serving


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> TwinPrefixIndex:
    """Return the index that workers take for the one in Redis."""
    twin = TwinPrefixIndex(time.monotonic)
    monkeypatch.setattr("blockyard.worker.server.connect", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr("blockyard.worker.server.RedisPrefixIndex", lambda *_, **__: twin)
    return twin


@pytest.fixture
async def worker(index: TwinPrefixIndex) -> AsyncIterator[WorkerServer]:
    async with serving(redis_url="redis://twin") as worker:
        yield worker


@pytest.fixture
async def session(worker: WorkerServer) -> AsyncIterator[Session]:
    async with Session(worker.address) as session:
        yield session


async def until(holds: Callable[[], Awaitable[object]], is_so: bool = True) -> None:
    async with asyncio.timeout(30.0):
        while bool(await holds()) is not is_so:  # noqa: ASYNC110 - what is waited for is in the index
            await asyncio.sleep(0.02)


async def serve_one(session: Session, handle: int = 1, length: int = 40, token: int = 5) -> list[bytes]:
    """Return the names of a prompt that the worker then caches."""
    await session.submit(handle, length=length, token=token)
    await session.tokens_of(handle)
    return chain(ROOT, [token] * length, 16)


async def test_a_workers_entries_follow_its_cache_leave_with_a_drain_and_come_back_on_resume(
    worker: WorkerServer, session: Session, index: TwinPrefixIndex
) -> None:
    names = await serve_one(session)
    await until(lambda: index.lookup(names))
    (holder,) = await index.lookup(names)
    assert (holder.worker_id, holder.incarnation, holder.depth) == ("worker-0", worker.incarnation, 2)
    await session.stub.DrainWorker(DrainWorkerRequest(grace_seconds=0))
    await until(lambda: index.lookup(names), False)
    assert [record.address for record in await index.directory()] == [worker.address]
    assert worker.stats()["index_entries"] == 0
    rebuilt = await session.stub.RebuildIndex(RebuildIndexRequest())
    assert rebuilt.workers == 0, "a drained worker has nothing to tell"
    await asyncio.sleep(0.3)
    assert await index.lookup(names) == []
    await session.stub.ResumeWorker(ResumeWorkerRequest())
    await until(lambda: index.lookup(names))
    assert [holder.depth for holder in await index.lookup(names)] == [2]


async def test_a_worker_that_stops_is_gone_from_the_index_when_it_has_stopped(
    worker: WorkerServer, session: Session, index: TwinPrefixIndex
) -> None:
    names = await serve_one(session)
    await until(lambda: index.lookup(names))
    await worker.stop()
    assert await index.lookup(names) == []
    assert await index.directory() == []


async def test_a_flush_forgets_what_nobody_holds_and_tells_the_index(
    worker: WorkerServer, session: Session, index: TwinPrefixIndex
) -> None:
    names = await serve_one(session)
    await until(lambda: index.lookup(names))
    await session.submit(2, length=48, token=7, max_tokens=400)
    await session.step_with(lambda step: step.handles)
    held = chain(ROOT, [7] * 48, 16)
    flushed: FlushCacheResponse = await session.stub.FlushCache(FlushCacheRequest())
    assert (flushed.flushed_blocks, flushed.flushed_host_blocks) == (2, 0)
    await until(lambda: index.lookup(names), False)
    await until(lambda: index.lookup(held))
    await in_engine(worker, lambda engine: engine.scheduler.check_invariants())
    again = await session.stub.FlushCache(FlushCacheRequest())
    assert again.flushed_blocks == 0
    await session.submit(3, length=40)
    step = await session.step_with(lambda step: 3 in step.handles)
    assert step.cached_tokens[list(step.handles).index(3)] == 0


async def test_a_flush_empties_host_memory_too_and_saves_nothing_there(index: TwinPrefixIndex) -> None:
    engine = engine_settings(host_cache_gib=0.001, max_model_len=256, kv_cache_memory=KV_BYTES // 4)
    async with serving(engine, redis_url="redis://twin") as worker, Session(worker.address) as session:
        for handle, length in ((1, 200), (2, 201), (3, 17)):
            await serve_one(session, handle, length, token=handle)
        in_host_memory = worker.stats()["host_cached_blocks"]
        flushed = await session.stub.FlushCache(FlushCacheRequest())
        assert flushed.flushed_host_blocks == in_host_memory > 0
        assert flushed.flushed_blocks > 0
        await in_engine(worker, lambda engine: engine.scheduler.check_invariants())
        load = await in_engine(worker, lambda engine: engine.load())
        assert (load.cached_blocks, load.host_cached_blocks) == (0, 0)
        async with asyncio.timeout(30):
            while worker.stats()["index_entries"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await serve_one(session, 4, 200, token=1)


async def test_a_rebuild_repairs_what_the_index_has_lost(session: Session, index: TwinPrefixIndex) -> None:
    names = await serve_one(session)
    await until(lambda: index.lookup(names))
    for bucket in index._buckets:
        bucket.clear()
    assert await index.lookup(names) == []
    rebuilt = await session.stub.RebuildIndex(RebuildIndexRequest())
    assert rebuilt.workers == 1
    await until(lambda: index.lookup(names))


async def test_a_worker_without_an_index_has_none_to_rebuild() -> None:
    async with serving() as worker, Session(worker.address) as session:
        rebuilt = await session.stub.RebuildIndex(RebuildIndexRequest())
        assert rebuilt.workers == 0
        await session.stub.DrainWorker(DrainWorkerRequest(grace_seconds=0))
        await session.stub.ResumeWorker(ResumeWorkerRequest())


@pytest.mark.parametrize("engine_kind", ["simulated", "model"])
async def test_a_worker_is_warm_before_it_serves_and_nothing_shows_it(engine_kind: str) -> None:
    async with (
        serving(engine_settings(engine=engine_kind, device="cpu")) as worker,
        Session(worker.address) as session,
    ):
        load = (await session.read_until("hello")).load
        assert load.prefill_tokens_per_second > 0
        assert load.decode_tokens_per_second > 0
        counted = (load.prompt_tokens, load.generated_tokens, load.cached_tokens, load.preemptions)
        assert counted == (0, 0, 0, 0)
        assert (load.free_blocks, load.cached_blocks, load.used_blocks) == (64, 0, 0)
        assert not await in_engine(worker, lambda engine: engine.cache.take_changes().stored)
