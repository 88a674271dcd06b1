"""The supervisor while a cluster grows and shrinks, and the state that survives the supervisor; without Ray."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest
from blockyard.deploy.dashboard.announcement import KV_NAMESPACE
from blockyard.deploy.lifecycle.scaling import Scaled, check_room, scaled_of, workers_of
from blockyard.deploy.supervision.desired_state import DesiredState, decoded, encoded
from blockyard.deploy.supervision.replicas import FIRST_BACKOFF_SECONDS, Replica, replicas_of
from blockyard.deploy.supervision.reports import NAMESPACE
from hypothesis import given
from hypothesis import strategies as st

from simulation.virtual_time import in_virtual_time

from .incarnations import SPEC, FakeIncarnations, Outlives, supervised, until
from .rig import report_of


async def names(supervisor: FakeIncarnations) -> tuple[str, ...]:
    return workers_of(await supervisor.report())


@supervised
async def test_growing_waits_until_the_routers_use_the_new_workers(supervisor: FakeIncarnations) -> None:
    supervisor.known = ("life-0",)
    growing = asyncio.create_task(supervisor.scale(3, 0.0))
    await until(lambda: len(supervisor.incarnations) == 3)
    await asyncio.sleep(0.2)
    assert not growing.done()
    supervisor.known = None
    await growing
    assert await names(supervisor) == ("worker-0", "worker-1", "worker-2")
    await until(lambda: supervisor.router.sent_addresses[-1] == ["worker-0:1", "worker-1:1", "worker-2:1"])


@supervised
async def test_shrinking_drains_the_highest_numbers_and_routers_forget_them(
    supervisor: FakeIncarnations,
) -> None:
    await supervisor.scale(3, 0.0)
    await supervisor.scale(1, 7.5)
    assert [worker.stopped_with for worker in supervisor.incarnations] == [[], [7.5], [7.5]]
    assert [worker.ended.is_set() for worker in supervisor.incarnations] == [False, True, True]
    assert await names(supervisor) == ("worker-0",)
    await until(lambda: supervisor.router.sent_addresses[-1] == ["worker-0:1"])
    await asyncio.sleep(3 * FIRST_BACKOFF_SECONDS)
    assert len(supervisor.incarnations) == 3, "nobody was started in replica of those that left"


@supervised
async def test_one_that_drains_to_leave_and_dies_is_not_started_again(supervisor: FakeIncarnations) -> None:
    await supervisor.scale(2, 0.0)
    supervisor.incarnations[1].may_stop.clear()
    shrinking = asyncio.create_task(supervisor.scale(1, 60.0))
    await until(lambda: supervisor.incarnations[1].stopped_with == [60.0])
    supervisor.incarnations[1].ended.set()
    await asyncio.sleep(3 * FIRST_BACKOFF_SECONDS)
    assert len(supervisor.incarnations) == 2
    supervisor.incarnations[1].may_stop.set()
    await shrinking
    assert await names(supervisor) == ("worker-0",)


@supervised
async def test_a_new_worker_that_does_not_start_is_told_and_can_be_given_up_or_asked_for_again(
    supervisor: FakeIncarnations,
) -> None:
    supervisor.fails_to_start = True
    with pytest.raises(RuntimeError, match="worker-1 does not start: RuntimeError: no such model"):
        await supervisor.scale(2, 0.0)
    await supervisor.scale(1, 0.0)
    assert await names(supervisor) == ("worker-0",)
    with pytest.raises(RuntimeError, match="worker-1 does not start"):
        await supervisor.scale(2, 0.0)
    supervisor.fails_to_start = False
    await supervisor.scale(2, 0.0)
    worker = await supervisor.replica("worker-1")
    assert (worker.phase, worker.error) == ("serving", "")
    with pytest.raises(ValueError, match="at least one worker, not 0"):
        await supervisor.scale(0, 0.0)


@supervised
async def test_growing_that_waits_for_room_is_taken_back_at_once(supervisor: FakeIncarnations) -> None:
    supervisor.never_starts = True
    growing = asyncio.create_task(supervisor.scale(3, 0.0))
    await asyncio.sleep(1.0)
    assert len((await supervisor.report()).replicas) == 4
    await supervisor.scale(1, 0.0)
    with pytest.raises(RuntimeError, match=r"worker-\d was removed meanwhile, by `scale` or `model remove`"):
        await growing
    assert await names(supervisor) == ("worker-0",)


@in_virtual_time
async def test_a_supervisor_that_is_started_again_keeps_the_number_that_was_asked_for() -> None:
    left = Outlives()
    first = FakeIncarnations(left)
    await first.scale(3, 0.0)
    await first.leave()
    second = FakeIncarnations(left)
    await asyncio.sleep(10.0)
    assert await names(second) == ("worker-0", "worker-1", "worker-2")
    assert second.incarnations == [], "it has adopted them"
    await second.leave()


@in_virtual_time
async def test_those_that_were_leaving_when_the_supervisor_died_go_on_to_leave() -> None:
    left = Outlives()
    first = FakeIncarnations(left)
    await first.scale(3, 0.0)
    for worker in first.incarnations[1:]:
        worker.may_stop.clear()
    shrinking = asyncio.create_task(first.scale(1, 7.5))
    await until(lambda: all(worker.stopped_with for worker in first.incarnations[1:]))
    shrinking.cancel()
    await first.leave()
    for worker in first.incarnations[1:]:
        worker.may_stop.set()
    second = FakeIncarnations(left)
    await until(lambda: all(worker.ended.is_set() for worker in first.incarnations[1:]))
    assert [worker.stopped_with for worker in first.incarnations[1:]] == [[7.5, 7.5], [7.5, 7.5]]
    assert await names(second) == ("worker-0",)
    assert second.incarnations == []
    await second.leave()


@in_virtual_time
async def test_who_was_taken_out_stays_out_when_he_and_the_supervisor_have_died() -> None:
    left = Outlives()
    first = FakeIncarnations(left)
    await until(lambda: len(first.incarnations) == 1)
    worker = await first.replica("worker-0")
    first.incarnations[0].draining = True
    await until(lambda: worker.phase == "draining")
    await until(lambda: left.load() is not None)
    await first.leave()
    first.incarnations[0].ended.set()

    second = FakeIncarnations(left)
    replica = await second.replica("worker-0")
    await until(lambda: bool(second.router.sent_addresses))
    assert (replica.phase, second.incarnations) == ("stopped", [])
    await second.restart("worker-0", 0.0)
    assert (replica.phase, len(second.incarnations)) == ("serving", 1)
    await until(lambda: left.load() == DesiredState(num_workers=1))
    await second.leave()


async def test_the_end_of_a_cluster_forgets_what_was_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    withdrawn: list[tuple[str, bytes]] = []

    async def withdraw(cluster: str, namespace: bytes = KV_NAMESPACE) -> None:
        withdrawn.append((cluster, namespace))

    monkeypatch.setattr("blockyard.deploy.supervision.supervisor.withdraw", withdraw)
    supervisor = FakeIncarnations()
    await supervisor.scale(2, 0.0)
    assert supervisor.left.load() == DesiredState(num_workers=2)
    supervisor._actors.pop("router-0")
    await supervisor.shut_down(0.0)
    assert supervisor.left.load() is None
    assert withdrawn == [("default", KV_NAMESPACE), ("default", NAMESPACE)]


def test_a_desired_state_comes_back_as_it_was_stored() -> None:
    desired = DesiredState(num_workers=3, grace_seconds=1.5, taken_out=frozenset({"worker-2", "worker-0"}))
    assert decoded(encoded(desired)) == desired


def room(
    free: list[dict[str, float]], missing: int, *, cpus: float = 1.0, gpus: float = 0.0, other: str = ""
) -> str:
    """Return why so many more workers do not fit beside one that runs, or nothing."""
    further = {"small": (0.5, 0.0)} if other else {}
    shares = {"cpus_per_worker": cpus, "gpus_per_worker": gpus, "further_shares": further}
    report = report_of(*replicas_of(SPEC, 1), **shares)
    try:
        check_room(free, report, missing, report.share(other or "m"))
    except ValueError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize(
    ("free", "settings", "missing", "fits"),
    [
        ([{"CPU": 1.0}, {"CPU": 1.0}], {}, 2, True),
        ([{"CPU": 1.9}], {}, 2, False),
        ([{"CPU": 0.5}, {"CPU": 0.5}], {}, 1, False),
        ([{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}], {"gpus": 1.0}, 1, True),
        ([{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}], {"gpus": 1.0}, 2, False),
        ([], {}, 1, False),
        ([{"CPU": 1.0}], {"cpus": 4.0, "other": "small"}, 2, True),
        ([{"CPU": 1.0}], {"cpus": 4.0}, 1, False),
    ],
)
def test_workers_fit_only_whole_on_a_node_with_the_share_of_their_model(
    free: list[dict[str, float]], settings: dict[str, Any], missing: int, fits: bool
) -> None:
    told = room(free, missing, **settings)
    assert told == "" if fits else re.search(rf"{missing} more workers? .* room for \d", told)


def test_who_has_no_room_is_told_what_workers_hold_and_how_to_start_with_less() -> None:
    assert room([{}], 1, cpus=2.0) == (
        "1 more worker of 2 CPUs each will not fit: the Ray cluster has room for 0, and running workers "
        "hold the rest. Add a node, have an autoscaler add it (--wait-for-nodes), or start the cluster with "
        "--cpus-per-worker 1"
    )
    assert room([{}], 2, cpus=2.0).endswith("--cpus-per-worker 0.66")
    assert room([{"CPU": 6.0}], 4, cpus=2.0).endswith("--cpus-per-worker 1")
    assert room([{}, {}], 1, cpus=2.0).endswith("with fewer CPUs for each (--cpus-per-worker)")
    assert "2 CPUs and 1 GPU each" in room([{"CPU": 8.0}], 1, cpus=2.0, gpus=1.0)
    several = report_of(*replicas_of(SPEC, 1), cpus_per_worker=4.0, further_shares={"small": (0.5, 0.0)})
    with pytest.raises(ValueError, match=r"1 more worker of 4 CPUs .* with fewer CPUs for each"):
        check_room([{"CPU": 1.0}], several, 1, several.share("m"))


@given(cpus=st.integers(1, 64), num_running=st.integers(1, 8), missing=st.integers(1, 8))
def test_the_share_that_a_refusal_names_lets_all_fit(cpus: int, num_running: int, missing: int) -> None:
    report = report_of(*replicas_of(SPEC, num_running), cpus_per_worker=cpus / num_running)
    with pytest.raises(ValueError, match="will not fit") as refused:
        check_room([{}], report, missing, report.share("m"))
    share = float(str(refused.value).rpartition(" ")[2])
    assert 0 < share * (num_running + missing) <= cpus + 1e-6


def test_what_was_scaled_is_said_in_one_line_with_who_is_taken_out_and_the_way_back() -> None:
    replicas = [Replica(name="router-0", kind="router", phase="draining"), *replicas_of(SPEC, 2)]
    replicas[2].phase = "stopped"
    scaled = scaled_of(("worker-0", "worker-1"), report_of(*replicas))
    assert (scaled.workers, scaled.taken_out) == (("worker-0", "worker-1"), ("worker-1",))
    assert scaled.line() == "nothing to do: 2 workers; worker-1 is taken out (`blockyard restart worker-1`)"
    same = Scaled(workers=("worker-0",), added=(), removed=())
    assert same.line() == "nothing to do: 1 worker"
    assert replace(same, added=("worker-1",)).line() == "1 worker now; new: worker-1"
    assert replace(same, removed=("worker-1", "worker-2")).line() == "1 worker now; gone: worker-1, worker-2"
