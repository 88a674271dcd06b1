"""The supervisor without Ray: what it remembers of ended replicas, what it restarts, how often it updates routers."""

import asyncio
from itertools import pairwise

import pytest
from blockyard.deploy.lifecycle.administration import restart_order, whole_models
from blockyard.deploy.supervision.replicas import (
    FIRST_BACKOFF_SECONDS,
    JOINING_SECONDS,
    PUSH_SECONDS,
    push_pause_seconds,
)
from blockyard.deploy.views.views import status_view

from .incarnations import FakeIncarnations, supervised, until
from .rig import cluster_state, printed


@supervised
async def test_a_router_that_ended_reaches_nobody_whatever_it_answers_later(
    supervisor: FakeIncarnations,
) -> None:
    router = await supervisor.replica("router")
    assert router.num_ready_workers == 1
    supervisor.router.may_answer.clear()
    told = len(supervisor.router.sent_at)
    await until(lambda: len(supervisor.router.sent_at) > told)
    supervisor.never_starts = True
    supervisor.router_ended.set()
    await until(lambda: router.phase != "serving")
    assert router.num_ready_workers == 0
    supervisor.router.may_answer.set()
    await asyncio.sleep(0.05)
    assert router.num_ready_workers == 0


@supervised
async def test_a_worker_that_a_router_refuses_is_told_of_less_and_less_often(
    supervisor: FakeIncarnations,
) -> None:
    supervisor.router.refused_lives = {"life-0": "other model files"}
    begun = len(supervisor.router.sent_at)
    await until(lambda: len(supervisor.router.sent_at) >= begun + 5)
    pauses = [later - earlier for earlier, later in pairwise(supervisor.router.sent_at)]
    assert pauses[-1] >= 2 * JOINING_SECONDS


def test_routers_are_told_often_only_while_they_get_on() -> None:
    pause = PUSH_SECONDS
    pauses = []
    for has_news in (True, True, False, False, False, False, False, False, True):
        pause = push_pause_seconds(pause, are_joined=False, has_news=has_news)
        pauses.append(pause / JOINING_SECONDS)
    assert [round(pause) for pause in pauses] == [1, 1, 2, 4, 8, 16, 20, 20, 1]
    assert push_pause_seconds(pause, are_joined=True, has_news=True) == PUSH_SECONDS


@supervised
async def test_a_restart_drains_first_and_is_no_failure(supervisor: FakeIncarnations) -> None:
    worker = await supervisor.replica("worker")
    await supervisor.restart("worker-0", 7.5)
    assert supervisor.incarnations[0].stopped_with == [7.5]
    assert (worker.phase, worker.incarnation, worker.num_starts) == ("serving", "life-1", 2)
    assert (worker.error, worker.num_failures_in_a_row, worker.is_leaving) == ("", 0, False)
    with pytest.raises(ValueError, match="'worker-7', only worker-0, router-0"):
        await supervisor.restart("worker-7", 0.0)


@supervised
async def test_a_restart_waits_until_every_router_gives_the_new_life_requests(
    supervisor: FakeIncarnations,
) -> None:
    supervisor.known = ("life-0",)
    restarting = asyncio.create_task(supervisor.restart("worker-0", 0.0))
    await until(lambda: len(supervisor.incarnations) == 2)
    await asyncio.sleep(0.2)
    assert not restarting.done()
    supervisor.known = ("life-1",)
    await restarting


@supervised
async def test_a_restart_that_fails_says_why_and_goes_on_trying(supervisor: FakeIncarnations) -> None:
    supervisor.fails_to_start = True
    with pytest.raises(RuntimeError, match="worker-0 does not start again: RuntimeError: no such model"):
        await supervisor.restart("worker-0", 0.0)
    supervisor.fails_to_start = False
    await until(lambda: len(supervisor.incarnations) == 2)


@supervised
async def test_a_worker_that_was_drained_and_dies_stays_out_until_it_is_asked_for(
    supervisor: FakeIncarnations,
) -> None:
    worker = await supervisor.replica("worker")
    for phase, draining in (("draining", True), ("serving", False), ("draining", True)):
        supervisor.incarnations[0].draining = draining
        await until(lambda phase=phase: worker.phase == phase)
    supervisor.incarnations[0].ended.set()
    await until(lambda: worker.phase == "stopped")
    await asyncio.sleep(3 * FIRST_BACKOFF_SECONDS)
    assert len(supervisor.incarnations) == 1
    await supervisor.restart("worker-0", 0.0)
    assert (worker.phase, len(supervisor.incarnations)) == ("serving", 2)
    for draining in (True, False):
        supervisor.incarnations[1].draining = draining
        await until(lambda draining=draining: (worker.phase == "draining") == draining)
    supervisor.incarnations[1].ended.set()
    await until(lambda: len(supervisor.incarnations) == 3)


@supervised
async def test_a_death_has_its_time_and_an_end_that_was_asked_for_has_none(
    supervisor: FakeIncarnations,
) -> None:
    worker = await supervisor.replica("worker")
    assert (await supervisor.report()).error_age_seconds(worker) is None
    supervisor.incarnations[0].ended.set()
    await until(lambda: worker.num_starts == 2)
    report = await supervisor.report()
    assert worker.failed_at is not None
    assert report.error_age_seconds(worker) == report.at_seconds - worker.failed_at
    await supervisor.restart("worker-0", 0.0)
    assert (await supervisor.report()).error_age_seconds(worker) is None


@supervised
async def test_no_worker_that_serves_is_stopped_once_its_models_files_have_changed(
    supervisor: FakeIncarnations,
) -> None:
    await supervisor.scale(2, 0.0)
    first, second = supervisor.incarnations
    first.changed = second.changed = "the files at /models/m changed: model.safetensors"
    for name in ("worker-0", "worker-1", "router-0"):
        with pytest.raises(RuntimeError, match=rf"the files at /models/m changed.*{name} was not stopped"):
            await supervisor.restart(name, 0.0)
    with pytest.raises(RuntimeError, match=r"the files at /models/m changed.*no worker of m was added"):
        await supervisor.scale(3, 0.0)
    assert (first.stopped_with, second.stopped_with, supervisor.router.num_kills) == ([], [], 0)
    assert len(supervisor.incarnations) == 2
    await supervisor.restart_at_once(["worker-0", "worker-1"], 2.5)
    assert (first.stopped_with, second.stopped_with) == ([2.5], [2.5])
    assert [worker.ended.is_set() for worker in supervisor.incarnations] == [True, True, False, False]
    with pytest.raises(ValueError, match="name worker-1 too"):
        whole_models((await supervisor.report()).replicas, ["worker-0", "router-0"])


@supervised
async def test_a_refused_worker_shows_as_such_and_ends_the_wait_of_commands(
    supervisor: FakeIncarnations,
) -> None:
    supervisor.known = ("life-0",)
    supervisor.router.refused_lives = {"life-1": "other model files than the first worker's"}
    told = "router-0 refuses it: other model files than the first worker's"
    with pytest.raises(RuntimeError, match=f"worker-1 runs, but {told}"):
        await supervisor.scale(2, 0.0)
    replica = await supervisor.replica("worker-1")
    assert (replica.shown_phase, replica.refusal) == ("refused", told)
    assert told in printed(status_view(cluster_state(), await supervisor.report(), {}, ()))
    supervisor.incarnations[1].changed = "the files changed"
    supervisor.known, supervisor.router.refused_lives = None, {}
    await supervisor.restart("worker-1", 0.0)
    assert supervisor.incarnations[1].stopped_with == [0.0], (
        "a refused worker serves nothing that a stop could end"
    )
    assert (await supervisor.replica("worker-1")).shown_phase == "serving"


def test_a_rolling_restart_goes_workers_first_or_as_named() -> None:
    known = ["worker-0", "worker-1", "router-0"]
    assert restart_order(known, ()) == known
    assert restart_order(known, ("router-0", "worker-1")) == ["worker-1", "router-0"]
    with pytest.raises(ValueError, match="'worker-2'"):
        restart_order(known, ("worker-0", "worker-2"))
