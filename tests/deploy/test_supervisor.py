"""What the supervisor remembers of those who ended, and how often it tells routers of workers; without Ray."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from blockyard.deploy.supervisor import (
    JOINING_SECONDS,
    PUSH_SECONDS,
    ClusterSpec,
    Place,
    Supervisor,
    push_pause_seconds,
)
from blockyard.router.config import RouterConfig
from blockyard.worker.config import EngineConfig, WorkerConfig

SPEC = ClusterSpec(
    namespace="test",
    worker=WorkerConfig(engine=EngineConfig(model="m")),
    num_workers=1,
    num_cpus_per_worker=1.0,
    num_gpus_per_worker=0.0,
    router=RouterConfig(model="m"),
    num_routers=1,
)


@dataclass
class Life:
    """A router's actor as far as the supervisor calls it."""

    answer: Callable[[list[str]], "asyncio.Future[int]"]
    set_workers: "Life" = field(init=False)

    def __post_init__(self) -> None:
        self.set_workers = self

    def remote(self, addresses: list[str]) -> "asyncio.Future[int]":
        return self.answer(addresses)


class WithoutRay(Supervisor):
    """Its places serve until `ended`; its routers are lives of ours."""

    def __init__(self, life: Life) -> None:
        self.ended = asyncio.Event()
        self._life = life
        super().__init__(SPEC)

    async def _run_once(self, place: Place) -> None:
        if self.ended.is_set():
            await asyncio.Event().wait()
        self._actors[place.name] = self._life
        place.phase, place.address = "serving", f"{place.name}:1"
        self._changed.set()
        await self.ended.wait()
        del self._actors[place.name]
        raise RuntimeError("it ended")

    async def leave(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    async def router(self) -> Place:
        return next(place for place in (await self.report()).places if place.kind == "router")


def ready(num_workers: int) -> "asyncio.Future[int]":
    answer = asyncio.get_running_loop().create_future()
    answer.set_result(num_workers)
    return answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing wakes who waits for a value
            await asyncio.sleep(0.01)


async def test_a_router_that_ended_reaches_nobody() -> None:
    supervisor = WithoutRay(Life(lambda addresses: ready(len(addresses))))
    router = await supervisor.router()
    await until(lambda: router.num_ready_workers == 1)
    supervisor.ended.set()
    await until(lambda: router.phase != "serving")
    assert router.num_ready_workers == 0
    await supervisor.leave()


async def test_the_answer_of_a_router_that_ended_meanwhile_says_nothing_of_the_next() -> None:
    asked: list[asyncio.Future[int]] = []

    def later(_: list[str]) -> "asyncio.Future[int]":
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    supervisor = WithoutRay(Life(later))
    router = await supervisor.router()
    await until(lambda: bool(asked))
    supervisor.ended.set()
    await until(lambda: router.phase != "serving")
    asked[0].set_result(1)
    await asyncio.sleep(0.05)
    assert router.num_ready_workers == 0
    await supervisor.leave()


async def test_a_worker_that_a_router_refuses_is_told_of_less_and_less_often() -> None:
    told: list[float] = []

    def refuse(_: list[str]) -> "asyncio.Future[int]":
        told.append(asyncio.get_running_loop().time())
        return ready(0)

    supervisor = WithoutRay(Life(refuse))
    await until(lambda: len(told) >= 4)
    await supervisor.leave()
    pauses = [later - earlier for earlier, later in pairwise(told)]
    assert pauses[-1] >= 2 * JOINING_SECONDS


def test_routers_are_told_often_only_while_they_get_on() -> None:
    pause = PUSH_SECONDS
    pauses = []
    for has_news in (True, True, False, False, False, False, False, False, True):
        pause = push_pause_seconds(pause, are_joined=False, has_news=has_news)
        pauses.append(pause / JOINING_SECONDS)
    assert [round(pause) for pause in pauses] == [1, 1, 2, 4, 8, 16, 20, 20, 1]
    assert push_pause_seconds(pause, are_joined=True, has_news=True) == PUSH_SECONDS
