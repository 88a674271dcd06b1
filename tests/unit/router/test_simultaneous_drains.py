"""Simultaneous drains through one router or several leave at least one worker that takes requests. In virtual time."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from blockyard.proto.v1 import admin_pb2, session_pb2
from blockyard.router.calls.bounds import CallBounds
from blockyard.router.cluster.view import ClusterView
from blockyard.router.errors import LastWorker, RequestAborted
from blockyard.router.model_group import ModelGroup
from blockyard.router.model_groups import ModelGroups
from blockyard.router.services.admin import DRAIN_KNOWN_SECONDS, AdminService, leaves_a_worker
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.virtual_time import VirtualLoop

NAMES = st.sampled_from(["a", "b", "c", "d"])
DELAYS = st.floats(0.0, 0.9 * DRAIN_KNOWN_SECONDS)


@given(worker=NAMES, ready=st.frozensets(NAMES), asked=st.frozensets(NAMES))
def test_a_drain_passes_exactly_where_somebody_else_is_left(worker, ready, asked):
    assert leaves_a_worker(worker, ready, asked) == bool(ready - asked - {worker})


class OneGroup(ModelGroups):
    """The group of one model, as far as a drain asks it."""

    def __init__(self, parts: SimpleNamespace) -> None:
        self._group = cast("ModelGroup", SimpleNamespace(parts=parts))

    def __iter__(self) -> Iterator[ModelGroup]:
        return iter((self._group,))


class Cluster:
    """Workers that drain at once, and routers that hear of it after a delay of their own."""

    def __init__(self, names: list[str], num_routers: int, delays: list[float]) -> None:
        self.is_draining = dict.fromkeys(names, False)
        self._delays = delays
        self._num_news = 0
        self._loop = asyncio.get_running_loop()
        self._views = [
            ClusterView(suspect_seconds=1e9, lost_seconds=2e9, clock=self._loop.time)
            for _ in range(num_routers)
        ]
        for view in self._views:
            for name in names:
                view.accepted(name, session_pb2.Hello(worker_id=name, incarnation=name, block_size=16))
        links = {name: SimpleNamespace(call=self._caller(name)) for name in names}
        self.routers = [
            AdminService(
                OneGroup(SimpleNamespace(fleet=SimpleNamespace(view=view, links=links))),
                cast("CallBounds", SimpleNamespace()),
                principal=lambda: "test",
            )
            for view in self._views
        ]

    def _caller(self, name: str) -> Any:
        async def call(method: str, request: Any, timeout_seconds: float) -> Any:
            await asyncio.sleep(self._delay())
            self.is_draining[name] = method == "DrainWorker"
            for view in self._views:
                self._loop.call_later(self._delay(), view.draining, name, method == "DrainWorker")
            return admin_pb2.DrainWorkerResponse()

        return call

    def _delay(self) -> float:
        self._num_news += 1
        return self._delays[self._num_news % len(self._delays)]

    async def drain(self, router: int, name: str, after_seconds: float) -> bool:
        """Whether it was let pass."""
        await asyncio.sleep(after_seconds)
        context = cast("Any", SimpleNamespace(time_remaining=lambda: None))
        try:
            await self.routers[router].DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=name), context)
        except (LastWorker, RequestAborted):
            return False
        return True


@settings(deadline=None)
@given(
    num_workers=st.integers(2, 4),
    num_routers=st.integers(1, 3),
    starts=st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 2.0)), min_size=4, max_size=4),
    delays=st.lists(DELAYS, min_size=1, max_size=7),
)
def test_when_all_are_drained_at_once_one_still_takes_requests(num_workers, num_routers, starts, delays):
    async def drains() -> None:
        names = ["a", "b", "c", "d"][:num_workers]
        cluster = Cluster(names, num_routers, delays)
        passed = await asyncio.gather(
            *(
                cluster.drain(router % num_routers, name, after)
                for name, (router, after) in zip(names, starts, strict=False)
            )
        )
        await asyncio.sleep(DRAIN_KNOWN_SECONDS)
        assert not all(cluster.is_draining.values())
        assert [cluster.is_draining[name] for name in names] == list(passed)

    _run(drains)


@settings(deadline=None)
@given(
    routers=st.lists(st.integers(0, 1), min_size=3, max_size=3),
    delays=st.lists(DELAYS, min_size=1, max_size=7),
)
def test_all_but_one_can_be_drained_at_once(routers: list[int], delays: list[float]) -> None:
    async def drains() -> None:
        cluster = Cluster(["a", "b", "c", "d"], 2, delays)
        asked = (cluster.drain(router, name, 0.0) for router, name in zip(routers, "abc", strict=True))
        assert await asyncio.gather(*asked) == [True] * 3
        assert not await cluster.drain(0, "d", 1.0)
        assert list(cluster.is_draining.values()) == [True, True, True, False]

    _run(drains)


def _run(work: Any) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
