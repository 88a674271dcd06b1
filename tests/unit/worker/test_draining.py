"""A draining worker: what routers are told, how running requests end, and which caller may resume it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from blockyard.proto.v1.admin_pb2 import DrainWorkerRequest, ResumeWorkerRequest
from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.proto.v1.session_pb2 import RejectReason, StepOutput
from blockyard.worker.server import WorkerServer
from blockyard.worker.session.session import SessionService

from .serving import Session, assert_refused, engine_settings, serving

DRAINING = RejectReason.REJECT_REASON_DRAINING
LONG = 120
"""Tokens of a request that is still running when a test has done what it wants with it."""


@pytest.fixture
async def worker() -> AsyncIterator[WorkerServer]:
    async with serving(engine_settings(simulated_step_seconds=0.01, max_num_seqs=4)) as worker:
        yield worker


@pytest.fixture
async def session(worker: WorkerServer) -> AsyncIterator[Session]:
    async with Session(worker.address) as session:
        yield session


def drain(session: Session, grace_seconds: float) -> Any:
    """Begin the call."""
    request = DrainWorkerRequest(grace_seconds=grace_seconds)
    return asyncio.ensure_future(session.stub.DrainWorker(request, timeout=60))


async def resume(session: Session) -> None:
    await session.stub.ResumeWorker(ResumeWorkerRequest())


async def until_runs(session: Session, max_tokens: int = LONG) -> None:
    await session.submit(1, max_tokens=max_tokens)
    await session.until_runs()


async def is_draining_at_hello(worker: WorkerServer) -> bool:
    async with Session(worker.address) as late:
        return bool((await late.read_until("hello")).is_draining)


async def all_until_failed(session: Session, handle: int, begun: Callable[[], None]) -> list[int]:
    """A request's tokens up to its failure, which must be DRAINING and come after them. Calls `begun` at the first."""
    tokens: list[int] = []
    is_new = True
    while True:
        step: StepOutput = await session.read_until("step")
        for row, offset, count in zip(step.handles, step.token_offsets, step.token_counts, strict=True):
            assert (row, offset) == (handle, len(tokens))
            tokens += step.token_ids[:count]
        if tokens and is_new:
            is_new = False
            begun()
        if step.failed_handles:
            assert (list(step.failed_handles), list(step.failed_reasons)) == ([handle], [DRAINING])
            return tokens


async def test_routers_hear_of_a_drain_at_once_and_what_runs_finishes(
    worker: WorkerServer, session: Session
) -> None:
    async with Session(worker.address) as other:
        await until_runs(session)
        drained = drain(session, 30.0)
        assert (await other.read_until("draining")).is_draining
        await other.submit(2)
        rejected = await other.read_until("rejected")
        assert (rejected.handle, rejected.reason) == (2, DRAINING)
        assert not drained.done()
        step = await session.step_with(lambda step: step.failed_handles or any(step.finish_reasons))
        assert not step.failed_handles
        assert (await drained).moved == 0
        assert worker.is_draining
        assert await is_draining_at_hello(worker)


async def test_after_the_grace_what_runs_is_given_back_behind_all_its_tokens(session: Session) -> None:
    await session.submit(1, max_tokens=LONG)
    reference = (await session.tokens_of(1))[1]
    await session.submit(2, max_tokens=LONG, sampling={"seed": 1})
    calls: list[Any] = []
    tokens = await all_until_failed(session, 2, lambda: calls.append(drain(session, 0.2)))
    assert tokens == reference[: len(tokens)]
    assert 0 < len(tokens) < LONG
    assert (await calls[0]).moved == 1
    await session.until_idle()


async def test_what_waits_in_the_worker_is_given_back_too(session: Session) -> None:
    for handle in range(1, 9):
        await session.submit(handle, max_tokens=LONG)
    await session.step_with(lambda step: (step.load.running, step.load.waiting) == (4, 4))
    drained = drain(session, 0.0)
    failed: set[int] = set()
    while len(failed) < 8:
        failed.update((await session.read_until("step")).failed_handles)
    assert failed == set(range(1, 9))
    assert (await drained).moved == 8


async def test_a_second_call_joins_the_first_and_the_shorter_grace_counts(session: Session) -> None:
    await until_runs(session, 400)
    first = drain(session, 600.0)
    await session.read_until("draining")
    longer = drain(session, 1200.0)
    await asyncio.sleep(0.1)
    assert not first.done()
    shorter = drain(session, 0.0)
    assert [answer.moved for answer in await asyncio.gather(first, longer, shorter)] == [1, 1, 1]


async def test_a_drain_goes_on_without_its_caller_and_ends_by_resume_alone(
    worker: WorkerServer, session: Session
) -> None:
    await until_runs(session, 400)
    call = drain(session, 600.0)
    await session.read_until("draining")
    call.cancel()
    await session.submit(2)
    assert (await session.read_until("rejected")).reason == DRAINING
    second = drain(session, 600.0)
    await asyncio.sleep(0.1)
    await resume(session)
    assert not (await session.read_until("draining")).is_draining
    await assert_refused(second, grpc.StatusCode.ABORTED)
    await session.submit(3)
    step = await session.step_with(lambda step: step.failed_handles or 3 in step.handles)
    assert not step.failed_handles
    assert not await is_draining_at_hello(worker)


async def test_a_drain_that_fails_tells_its_callers_at_once_and_can_be_taken_back(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: SessionService) -> int:
        raise RuntimeError("a secret path")

    monkeypatch.setattr(SessionService, "hand_over", fail)
    for _ in range(2):
        details = await assert_refused(drain(session, 5.0), grpc.StatusCode.INTERNAL)
        assert "secret" not in details
    await resume(session)
    await session.submit(1)
    await session.tokens_of(1)


async def test_resume_without_a_drain_changes_nothing_and_a_drain_can_follow_a_drain(
    worker: WorkerServer, session: Session
) -> None:
    await resume(session)
    for grace_seconds in (-1.0, float("nan"), float("inf"), 86_401.0):
        await assert_refused(drain(session, grace_seconds), grpc.StatusCode.INVALID_ARGUMENT)
        assert not worker.is_draining
    for _ in range(2):
        assert (await drain(session, 5.0)).moved == 0
        assert (await drain(session, 5.0)).moved == 0
        await resume(session)
    await session.submit(1)
    await session.tokens_of(1)


async def test_what_waits_for_its_grammar_goes_back_to_its_router(
    worker: WorkerServer, session: Session
) -> None:
    asked = asyncio.Event()

    async def never(wanted: StructuredOutput, client: str) -> object:
        asked.set()
        return await asyncio.Event().wait()

    worker._service._compile_grammar = never
    await session.submit(1, sampling={"structured_output": StructuredOutput(regex="a+")})
    await asyncio.wait_for(asked.wait(), 20)
    assert (await drain(session, 600.0)).moved == 0
    rejected = await session.read_until("rejected")
    assert (rejected.handle, rejected.reason) == (1, DRAINING)


async def test_stopping_gives_back_what_runs_and_then_ends_the_stream_well(
    worker: WorkerServer, session: Session
) -> None:
    await session.submit(1, max_tokens=LONG)
    stopping: list[asyncio.Task[None]] = []
    begin = lambda: stopping.append(asyncio.create_task(worker.stop(0.1)))  # noqa: E731
    assert 0 < len(await all_until_failed(session, 1, begin)) < LONG
    while await asyncio.wait_for(session.call.read(), 20) is not grpc.aio.EOF:
        pass
    assert await session.call.code() is grpc.StatusCode.OK
    await stopping[0]


async def test_a_worker_whose_engine_hangs_still_stops(
    worker: WorkerServer, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockyard.worker.server.HAND_OVER_SECONDS", 0.1)
    released = asyncio.Event()
    loop = asyncio.get_running_loop()
    blocked = worker._engine.call(
        lambda _: asyncio.run_coroutine_threadsafe(released.wait(), loop).result(timeout=60)
    )
    await session.until_taken()
    async with asyncio.timeout(20):
        await worker._drain(0.0)
    released.set()
    await asyncio.wrap_future(blocked)


async def test_the_drain_of_a_worker_that_ends_cannot_be_taken_back(
    worker: WorkerServer, session: Session
) -> None:
    await until_runs(session)
    ending = asyncio.create_task(worker.stop(5))
    await session.read_until("draining")
    await assert_refused(
        session.stub.ResumeWorker(ResumeWorkerRequest()), grpc.StatusCode.FAILED_PRECONDITION
    )
    await ending
