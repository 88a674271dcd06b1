"""An operator's actions on a worker's cache and on its part of the index, and a worker's start and stop."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.contract import Holder
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.v1.admin_pb2 import (
    DrainWorkerRequest,
    FlushCacheRequest,
    FlushCacheResponse,
    RebuildIndexRequest,
    ResumeWorkerRequest,
)
from blockyard.proto.v1.session_pb2 import StepOutput
from blockyard.worker.config import WorkerConfig
from blockyard.worker.server import WorkerServer

from .checkpoints import shared_checkpoint
from .test_server import KV_BYTES, engine_settings
from .test_session import ROOT, Session, chain

PATIENCE_SECONDS = 30.0


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisProcess]:
    server = start_private_redis(tmp_path)
    yield server
    server.stop()


@pytest.fixture
async def index(redis_server: RedisProcess) -> AsyncIterator[RedisPrefixIndex]:
    client = connect(redis_server.url, timeout_seconds=5)
    yield RedisPrefixIndex(client, "default")
    await client.aclose()


@pytest.fixture
async def worker(redis_server: RedisProcess) -> AsyncIterator[WorkerServer]:
    config = WorkerConfig(engine=engine_settings(), cluster_secret="hush", redis_url=redis_server.url)
    server = WorkerServer(config)
    await server.start()
    yield server
    await server.stop(0)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await holds():  # noqa: ASYNC110 - what is waited for is in Redis
            await asyncio.sleep(0.02)


async def serve_one(session: Session, handle: int = 1, length: int = 40, token: int = 5) -> list[bytes]:
    """The names of a prompt that the worker then caches."""
    await session.submit(handle, length=length, token=token)
    await session.tokens_of(handle)
    return chain(ROOT, [token] * length, 16)


async def found(index: RedisPrefixIndex, names: list[bytes]) -> list[Holder]:
    return list(await index.lookup(names))


async def test_a_drained_workers_entries_leave_the_index_and_come_back_on_resume(
    worker: WorkerServer, index: RedisPrefixIndex
) -> None:
    async with Session(worker.address) as session:
        names = await serve_one(session)
        await until(lambda: is_found(index, names))
        await session.stub.DrainWorker(DrainWorkerRequest(grace_seconds=0))
        await until(lambda: is_lost(index, names))
        assert [record.address for record in await index.directory()] == [worker.address]
        assert worker.stats()["index_entries"] == 0
        rebuilt = await session.stub.RebuildIndex(RebuildIndexRequest())
        assert rebuilt.workers == 0, "a drained worker has nothing to tell"
        await asyncio.sleep(0.3)
        assert await found(index, names) == []
        await session.stub.ResumeWorker(ResumeWorkerRequest())
        await until(lambda: is_found(index, names))
        assert [holder.depth for holder in await found(index, names)] == [2]


async def is_found(index: RedisPrefixIndex, names: list[bytes]) -> bool:
    return bool(await found(index, names))


async def is_lost(index: RedisPrefixIndex, names: list[bytes]) -> bool:
    return not await found(index, names)


async def test_a_worker_that_stops_is_gone_from_the_index_when_it_has_stopped(
    redis_server: RedisProcess, index: RedisPrefixIndex
) -> None:
    config = WorkerConfig(
        engine=engine_settings(), cluster_secret="hush", redis_url=redis_server.url, lease_seconds=600.0
    )
    worker = WorkerServer(config)
    await worker.start()
    async with Session(worker.address) as session:
        names = await serve_one(session)
        await until(lambda: is_found(index, names))
        await worker.stop()
    assert await found(index, names) == []
    assert await index.directory() == []


async def test_a_flush_forgets_what_nobody_holds_and_tells_the_index(
    worker: WorkerServer, index: RedisPrefixIndex
) -> None:
    async with Session(worker.address) as session:
        names = await serve_one(session)
        await until(lambda: is_found(index, names))
        await session.submit(2, length=48, token=7, max_tokens=400)
        step: StepOutput = await session.read_until("step")
        while not step.handles:
            step = await session.read_until("step")
        held = chain(ROOT, [7] * 48, 16)
        flushed: FlushCacheResponse = await session.stub.FlushCache(FlushCacheRequest())
        assert (flushed.flushed_blocks, flushed.flushed_host_blocks) == (2, 0)
        await until(lambda: is_lost(index, names))
        await until(lambda: is_found(index, held))
        worker._loaded.engine.cache.check_invariants()
        worker._loaded.engine.pool.check_invariants()
        again = await session.stub.FlushCache(FlushCacheRequest())
        assert again.flushed_blocks == 0
        await session.submit(3, length=40)
        while True:
            step = await session.read_until("step")
            if 3 in step.handles:
                break
        assert step.cached_tokens[list(step.handles).index(3)] == 0


async def test_a_flush_empties_host_memory_too_and_saves_nothing_there(redis_server: RedisProcess) -> None:
    engine = engine_settings(host_cache_gib=0.001, max_model_len=256, kv_cache_memory=KV_BYTES // 4)
    config = WorkerConfig(engine=engine, cluster_secret="hush", redis_url=redis_server.url)
    worker = WorkerServer(config)
    await worker.start()
    try:
        async with Session(worker.address) as session:
            for handle, length in ((1, 200), (2, 201), (3, 17)):
                await serve_one(session, handle, length, token=handle)
            in_host_memory = worker.stats()["host_cached_blocks"]
            flushed = await session.stub.FlushCache(FlushCacheRequest())
            assert flushed.flushed_host_blocks == in_host_memory > 0
            assert flushed.flushed_blocks > 0
            loaded = worker._loaded.engine
            assert loaded.scheduler.host_cache is not None
            loaded.scheduler.host_cache.check_invariants()
            loaded.cache.check_invariants()
            assert (loaded.pool.num_cached, len(loaded.scheduler.host_cache)) == (0, 0)

            async def is_told() -> bool:
                return worker.stats()["index_entries"] == 0

            await until(is_told)
            await serve_one(session, 4, 200, token=1)
    finally:
        await worker.stop(0)


async def test_a_rebuild_repairs_what_the_index_has_lost(
    worker: WorkerServer, index: RedisPrefixIndex, redis_server: RedisProcess
) -> None:
    client = connect(redis_server.url, timeout_seconds=5)
    try:
        async with Session(worker.address) as session:
            names = await serve_one(session)
            await until(lambda: is_found(index, names))
            for key in [key async for key in client.scan_iter("*") if await client.type(key) == b"hash"]:
                if names_in_bucket := [field for field in await client.hkeys(key) if len(field) == 7]:
                    await client.hdel(key, *names_in_bucket)
            assert await found(index, names) == []
            rebuilt = await session.stub.RebuildIndex(RebuildIndexRequest())
            assert rebuilt.workers == 1
            await until(lambda: is_found(index, names))
    finally:
        await client.aclose()


async def test_a_worker_without_an_index_has_none_to_rebuild() -> None:
    worker = WorkerServer(WorkerConfig(engine=engine_settings(), cluster_secret="hush"))
    await worker.start()
    try:
        async with Session(worker.address) as session:
            rebuilt = await session.stub.RebuildIndex(RebuildIndexRequest())
            assert rebuilt.workers == 0
            await session.stub.DrainWorker(DrainWorkerRequest(grace_seconds=0))
            await session.stub.ResumeWorker(ResumeWorkerRequest())
    finally:
        await worker.stop(0)


@pytest.mark.parametrize("engine_kind", ["simulated", "model"])
async def test_a_worker_is_warm_before_it_serves_and_nothing_shows_it(engine_kind: str) -> None:
    engine = engine_settings(engine=engine_kind, device="cpu")
    worker = WorkerServer(WorkerConfig(engine=engine, cluster_secret="hush"))
    await worker.start()
    try:
        async with Session(worker.address) as session:
            load = (await session.read_until("hello")).load
            assert load.prefill_tokens_per_second > 0
            assert load.decode_tokens_per_second > 0
            counted = (load.prompt_tokens, load.generated_tokens, load.cached_tokens, load.preemptions)
            assert counted == (0, 0, 0, 0)
            assert (load.free_blocks, load.cached_blocks, load.used_blocks) == (64, 0, 0)
        assert not worker._loaded.engine.cache.take_changes().stored
        loaded = worker._loaded.engine
        loaded.pool.check_invariants()
    finally:
        await worker.stop(0)


class Process:
    """`python -m blockyard.worker` with a simulated engine."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "blockyard.worker", "--model"]
        command += [str(shared_checkpoint("LlamaForCausalLM")), "--engine", "simulated"]
        command += ["--kv-cache-memory", str(KV_BYTES), "--simulated-step-seconds", "0.02", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "BLOCKYARD_CLUSTER_SECRET": "hush"}
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.popen.stderr is not None
        serves = (re.search(r"serves at (\S+)", line) for line in self.popen.stderr)
        self.address = next(match[1] for match in serves if match)
        # What nobody reads would fill the pipe in time, and hold the worker up.
        threading.Thread(target=self.popen.stderr.read, daemon=True).start()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait()

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.popen.wait, PATIENCE_SECONDS)


async def first_tokens(session: Session) -> int:
    while not (step := await session.read_until("step")).token_ids:
        pass
    return len(step.token_ids)


@pytest.mark.ci
async def test_sigterm_lets_what_runs_finish_and_exits_0() -> None:
    with Process() as process:
        async with Session(process.address) as session:
            await session.submit(1, max_tokens=60)
            received = await first_tokens(session)
            process.popen.send_signal(signal.SIGTERM)
            was_told, has_ended = False, False
            while not has_ended:
                message = await session.read()
                was_told |= message.draining.is_draining
                received += len(message.step.token_ids)
                has_ended = any(message.step.finish_reasons)
            assert (was_told, received) == (True, 60)
        assert await process.exit_code() == 0


@pytest.mark.ci
async def test_sigterm_gives_back_what_outlives_the_grace_and_exits_0() -> None:
    with Process("--grace-seconds", "0.2") as process:
        async with Session(process.address) as session:
            await session.submit(1, max_tokens=450)
            await first_tokens(session)
            process.popen.send_signal(signal.SIGTERM)
            step = StepOutput()
            while not step.failed_handles:
                step = await session.read_until("step")
        assert await process.exit_code() == 0


@pytest.mark.ci
async def test_a_second_sigterm_ends_it_at_once() -> None:
    with Process("--grace-seconds", "600") as process:
        async with Session(process.address) as session:
            await session.submit(1, max_tokens=450)
            await first_tokens(session)
            process.popen.send_signal(signal.SIGTERM)
            await session.read_until("draining")
            process.popen.send_signal(signal.SIGTERM)
            assert await process.exit_code() == -signal.SIGTERM


def test_a_grace_that_makes_no_sense_is_refused() -> None:
    for grace_seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="grace_seconds"):
            WorkerConfig(engine=engine_settings(), grace_seconds=grace_seconds)
