"""Replicas that no longer answer the supervisor, in virtual time and without Ray."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from blockyard.deploy.supervision.actors import START_SECONDS
from blockyard.deploy.supervision.liveness import (
    ANSWER_SECONDS,
    QUESTION_SECONDS,
    STARTING_SECONDS,
    HealthCheck,
    HungError,
)
from blockyard.deploy.supervision.replicas import DEFAULT_HUNG_SECONDS, Replica
from blockyard.deploy.supervision.supervisor import Supervisor
from blockyard.deploy.views.views import replica_dict
from blockyard.router.supervision import CHECK_SECONDS, SILENCE_SECONDS, SupervisorWatch
from ray.exceptions import ActorUnavailableError

from simulation.virtual_time import Process, VirtualLoop, in_virtual_time

from .incarnations import PID, FakeIncarnations, Worker, supervised

TRUTH_SECONDS = 5.0
"""Time within which `status` shows a frozen replica."""


@supervised
async def test_a_frozen_worker_is_told_within_five_seconds_and_replaced(supervisor: FakeIncarnations) -> None:
    worker = await supervisor.replica("worker")
    supervisor.incarnations[0].is_frozen = True
    await asyncio.sleep(TRUTH_SECONDS)
    assert replica_dict(worker)["phase"] == "not answering"
    assert not supervisor.incarnations[0].ended.is_set()
    await asyncio.sleep(DEFAULT_HUNG_SECONDS + QUESTION_SECONDS)
    assert supervisor.incarnations[0].ended.is_set(), "it lives on beside its successor"
    assert (replica_dict(worker)["phase"], worker.incarnation) == ("serving", "life-1")
    assert "did not answer for 20 s" in worker.error


@supervised
async def test_a_frozen_router_is_told_and_replaced(supervisor: FakeIncarnations) -> None:
    router = await supervisor.replica("router")
    supervisor.router.is_frozen = True
    await asyncio.sleep(TRUTH_SECONDS)
    assert replica_dict(router)["phase"] == "not answering"
    await asyncio.sleep(DEFAULT_HUNG_SECONDS + QUESTION_SECONDS)
    assert "did not answer for 20 s" in router.error
    assert supervisor.router.num_kills == 1
    assert replica_dict(router)["phase"] == "serving"


@supervised
async def test_a_worker_whose_answers_are_slow_is_left_alone(supervisor: FakeIncarnations) -> None:
    supervisor.incarnations[0].answers_after_seconds = 0.75 * DEFAULT_HUNG_SECONDS
    await asyncio.sleep(10 * DEFAULT_HUNG_SECONDS)
    assert len(supervisor.incarnations) == 1
    supervisor.incarnations[0].answers_after_seconds = 0.0
    await asyncio.sleep(DEFAULT_HUNG_SECONDS)
    assert replica_dict(await supervisor.replica("worker"))["phase"] == "serving"


@in_virtual_time
async def test_a_worker_that_starts_for_long_is_left_alone() -> None:
    supervisor = FakeIncarnations()
    supervisor.loads_for_seconds = 10 * STARTING_SECONDS
    await asyncio.sleep(5 * STARTING_SECONDS)
    supervisor.incarnations[0].answers_after_seconds = 0.75 * STARTING_SECONDS
    await asyncio.sleep(4 * STARTING_SECONDS)
    worker = await supervisor.replica("worker")
    assert (worker.phase, worker.error) == ("starting", "")
    supervisor.incarnations[0].answers_after_seconds = 0.0
    await asyncio.sleep(2 * STARTING_SECONDS)
    assert (worker.phase, len(supervisor.incarnations)) == ("serving", 1)
    await supervisor.leave()


@in_virtual_time
async def test_a_worker_that_freezes_while_it_starts_is_replaced() -> None:
    supervisor = FakeIncarnations()
    supervisor.loads_for_seconds = 10 * STARTING_SECONDS
    await asyncio.sleep(10.0)
    supervisor.incarnations[0].is_frozen = True
    await asyncio.sleep(STARTING_SECONDS - 2 * QUESTION_SECONDS)
    assert len(supervisor.incarnations) == 1
    await asyncio.sleep(4 * QUESTION_SECONDS)
    worker = await supervisor.replica("worker")
    assert supervisor.incarnations[0].ended.is_set(), "it lives on beside its successor"
    assert (worker.phase, len(supervisor.incarnations)) == ("starting", 2)
    assert "did not answer for 120 s" in worker.error
    assert supervisor.ended_processes == [1]
    await supervisor.leave()


class Downloads(FakeIncarnations):
    """Workers start by the supervisor's own steps, and their model, `m`, is on the hub alone."""

    def __init__(self, *, downloads_for_seconds: float = 0.0, loads_for_seconds: float = 0.0) -> None:
        self._downloads_for_seconds = downloads_for_seconds
        self._loads_for_seconds = loads_for_seconds
        super().__init__()

    async def _run_once(self, replica: Replica) -> None:
        if replica.kind == "router":
            await super()._run_once(replica)
        else:
            await Supervisor._run_once(self, replica)

    def _adopt_or_create(self, replica: Replica, group: Any) -> Worker:
        worker = self._adopt_or_make(replica.name)
        worker.downloads_for_seconds = self._downloads_for_seconds
        worker.loads_for_seconds = self._loads_for_seconds
        return worker

    def _node_id(self) -> str:
        return "the-supervisors-node"


@contextlib.asynccontextmanager
async def downloading(**seconds: float) -> AsyncIterator[Downloads]:
    """Takes the supervisor down after a failed assertion too: pytest's report of it would meet its dying tasks."""
    supervisor = Downloads(**seconds)
    try:
        yield supervisor
    finally:
        await supervisor.leave()


@in_virtual_time
async def test_a_model_that_downloads_for_longer_than_a_start_may_take_is_no_hang() -> None:
    async with downloading(downloads_for_seconds=5 * START_SECONDS) as supervisor:
        worker = await supervisor.replica("worker")
        for _ in range(4):
            await asyncio.sleep(START_SECONDS)
            assert (worker.phase, worker.error, worker.num_missed) == ("downloading", "", 0)
        await asyncio.sleep(2 * START_SECONDS)
        assert (worker.phase, worker.error, worker.num_starts) == ("serving", "", 1)
        assert len(supervisor.incarnations) == 1


@in_virtual_time
async def test_the_clock_of_a_start_begins_when_the_model_is_there() -> None:
    async with downloading(
        downloads_for_seconds=START_SECONDS, loads_for_seconds=10 * START_SECONDS
    ) as supervisor:
        worker = await supervisor.replica("worker")
        await asyncio.sleep(1.9 * START_SECONDS)
        assert (worker.phase, worker.error, len(supervisor.incarnations)) == ("starting", "", 1)
        await asyncio.sleep(0.2 * START_SECONDS)
        assert worker.error == f"did not start within {START_SECONDS:.0f} s"
        assert supervisor.incarnations[0].ended.is_set(), "it lives on beside its successor"
        assert (worker.phase, len(supervisor.incarnations)) == ("downloading", 2)


@in_virtual_time
async def test_a_worker_that_freezes_while_it_downloads_is_replaced() -> None:
    async with downloading(downloads_for_seconds=5 * START_SECONDS) as supervisor:
        worker = await supervisor.replica("worker")
        await asyncio.sleep(START_SECONDS)
        supervisor.incarnations[0].is_frozen = True
        await asyncio.sleep(STARTING_SECONDS + 2 * QUESTION_SECONDS)
        assert "did not answer for 120 s" in worker.error
        assert supervisor.ended_processes == [PID]
        assert (worker.phase, len(supervisor.incarnations)) == ("downloading", 2)


@in_virtual_time
async def test_a_worker_that_waits_for_a_node_is_left_alone() -> None:
    """Nothing of it runs yet, and so nothing answers."""
    supervisor = FakeIncarnations()
    supervisor.loads_for_seconds = 10 * STARTING_SECONDS
    supervisor.is_without_room = True
    await asyncio.sleep(4 * STARTING_SECONDS)
    assert len(supervisor.incarnations) == 1
    supervisor.incarnations[0].is_frozen = False
    await asyncio.sleep(10 * STARTING_SECONDS)
    assert (len(supervisor.incarnations), (await supervisor.replica("worker")).phase) == (1, "serving")
    await supervisor.leave()


@in_virtual_time
async def test_a_supervisor_that_was_frozen_itself_kills_nobody() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    process = Process("supervisor", loop)
    made: list[FakeIncarnations] = []

    async def supervise() -> None:
        made.append(FakeIncarnations())

    process.start(supervise())
    await asyncio.sleep(10.0)
    process.freeze()
    await asyncio.sleep(10 * DEFAULT_HUNG_SECONDS)
    process.thaw()
    await asyncio.sleep(2 * QUESTION_SECONDS)
    (supervisor,) = made
    worker = await supervisor.replica("worker")
    assert (len(supervisor.incarnations), supervisor.router.num_kills) == (1, 0)
    assert (worker.phase, worker.error, worker.num_missed) == ("serving", "", 0)
    await supervisor.leave()


@in_virtual_time
async def test_an_answer_ends_the_silence_and_silence_ends_what_is_waited_for() -> None:
    answers = asyncio.Event()
    ended: list[bool] = []

    async def end() -> bool:
        ended.append(bool(ended))
        return ended[-1]

    health = HealthCheck(answers.wait, end, silence_seconds=3 * QUESTION_SECONDS)
    waited = asyncio.ensure_future(health.unless_hung(asyncio.Event().wait()))
    for _ in range(2):
        assert await health.look() is None
    assert health.num_missed == 2
    answers.set()
    assert await health.look() is True
    assert health.num_missed == 0
    answers.clear()
    for num_tries in (1, 2):  # The first try to end it fails.
        for _ in range(3):
            assert not waited.done()
            assert await health.look() is None
        await asyncio.sleep(0.1)
        assert (health.num_missed, ended) == (3 * num_tries, [False, True][:num_tries])
    with pytest.raises(HungError):
        await waited
    await health.stop()


@in_virtual_time
async def test_a_lost_connection_is_no_answer_and_counts_like_silence() -> None:
    async def ask() -> None:
        raise ActorUnavailableError("connection reset", None)

    async def end() -> bool:
        return False

    health, begun = HealthCheck(ask, end), asyncio.get_running_loop().time()
    for num_missed in (1, 2):
        assert await health.look() is None
        assert health.num_missed == num_missed
    assert asyncio.get_running_loop().time() - begun == 2 * ANSWER_SECONDS
    await health.stop()


@in_virtual_time
async def test_a_router_ends_a_supervisor_that_is_silent_and_lets_the_next_one_start() -> None:
    ends: list[float] = []
    still_silent: list[Callable[[], bool]] = []
    loop = asyncio.get_running_loop()

    async def end(is_silent: Callable[[], bool]) -> None:
        ends.append(loop.time() - begun)
        still_silent.append(is_silent)
        raise ConnectionError("what fails is tried again")

    watch, begun = SupervisorWatch(end), loop.time()
    watching = asyncio.create_task(watch.run())
    for _ in range(20):
        await asyncio.sleep(4.0)
        watch.heard()
    assert ends == []
    begun = loop.time()
    await asyncio.sleep(3.5 * SILENCE_SECONDS)
    assert ends == pytest.approx([SILENCE_SECONDS, 3 * SILENCE_SECONDS], abs=CHECK_SECONDS)
    assert still_silent[-1]()
    watch.heard()
    assert not still_silent[-1](), "a kill that Ray has delayed ends a supervisor that speaks again"
    begun = loop.time()
    await asyncio.sleep(1.5 * SILENCE_SECONDS)
    assert ends[2:] == pytest.approx([SILENCE_SECONDS], abs=CHECK_SECONDS)
    watching.cancel()


@in_virtual_time
async def test_a_router_that_was_frozen_itself_does_not_blame_the_supervisor() -> None:
    ends: list[float] = []
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)

    async def end(is_silent: Callable[[], bool]) -> None:
        ends.append(loop.time())

    watch, process = SupervisorWatch(end), Process("router", loop)
    watching = process.start(watch.run())
    await asyncio.sleep(CHECK_SECONDS)
    process.freeze()
    await asyncio.sleep(10 * SILENCE_SECONDS)
    process.thaw()
    await asyncio.sleep(2 * CHECK_SECONDS)
    watch.heard()
    await asyncio.sleep(0.5 * SILENCE_SECONDS)
    assert ends == []
    watching.cancel()
