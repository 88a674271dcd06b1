"""Keeps a cluster's workers and routers alive: one detached Ray actor.

Owns who should run, who does, and the pause before another try. Does not own serving: it may die at any
moment and Ray restarts it (max_restarts=-1); it remembers nothing and adopts the running by name. Workers and
routers are detached actors of max_restarts=0: a death is seen in milliseconds, where Ray's own restart takes
more than a second, and each restart is a new incarnation.

    place: STARTING -> SERVING <-> DRAINING -> (death) -> WAITING, longer each time -> STARTING
                                      |-> (death) -> STOPPED, until somebody asks for it again

A worker that was drained and has died is one that its operator took out: it is not started again by itself.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import ray
from blockyard.router.actor import RouterActor
from blockyard.router.config import RouterConfig
from blockyard.worker.actor import StartedWorker, WorkerActor
from blockyard.worker.config import WorkerConfig
from ray.exceptions import RayActorError, RayTaskError

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 10.0
STEADY_SECONDS = 30.0
"""Who has served so long is forgiven the deaths before."""
START_SECONDS = 600.0
PUSH_SECONDS = 2.0
"""Routers are told again this often, in case a call was lost."""
JOINING_SECONDS = 0.1
"""This soon while routers reach one worker after the other; less and less often where one of them never reaches all,
as with a worker that they refuse."""
CALL_SECONDS = 5.0
GOODBYE_SECONDS = 30.0
"""Beyond its grace, for one that stops: the step under way has to end."""
LOOK_SECONDS = 0.05
"""While a restart is waited for."""
MAX_FAILED_STARTS = 3
"""Of one that is restarted: then whoever asked for it is told, and it is tried on."""

Kind = Literal["worker", "router"]
Phase = Literal["starting", "serving", "draining", "waiting", "stopped"]
Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What should run. The configs are templates: each place gets its own id and port."""

    namespace: str
    worker: WorkerConfig
    num_workers: int
    num_cpus_per_worker: float
    num_gpus_per_worker: float
    router: RouterConfig
    num_routers: int


@dataclass(slots=True, kw_only=True)
class Place:
    """One worker or router that should run, and how it is doing."""

    name: str
    kind: Kind
    phase: Phase = "starting"
    address: str = ""
    pid: int = 0
    node_id: str = ""
    incarnation: str = ""
    num_ready_workers: int = 0
    """Of a router: the workers that it had a session with when it was last told of them."""
    serving_since: float | None = None
    """By the supervisor's monotonic clock."""
    num_starts: int = 0
    num_failures_in_a_row: int = 0
    is_leaving: bool = False
    """It was told to stop: its end is no failure, and another is started at once."""
    error: str = ""
    """Why the last one ended or did not start: a kind of failure, never a prompt."""

    @property
    def was_taken_out(self) -> bool:
        """Somebody drained it, and not to start it afresh."""
        return self.phase == "draining" and not self.is_leaving

    @property
    def is_up(self) -> bool:
        return self.phase in ("serving", "draining")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorReport:
    """Who should run and how each is doing."""

    pid: int
    """The supervisor's own."""
    places: list[Place]


def places_of(spec: ClusterSpec) -> list[Place]:
    workers = [Place(name=f"worker-{number}", kind="worker") for number in range(spec.num_workers)]
    return workers + [Place(name=f"router-{number}", kind="router") for number in range(spec.num_routers)]


def router_port(router: RouterConfig, place: Place) -> int:
    """Where a router listens. Kept over a restart, so that clients find it where it was. At first routers share the
    port, or stand side by side from it; with 0 each takes a free one."""
    if place.address:
        return int(place.address.rpartition(":")[2])
    if router.reuse_port or not router.port:
        return router.port
    return router.port + int(place.name.rpartition("-")[2])


def backoff_seconds(num_failures_in_a_row: int) -> float:
    """Doubles from FIRST_BACKOFF_SECONDS to MAX_BACKOFF_SECONDS. The first death is answered almost at
    once."""
    doublings = max(0, min(num_failures_in_a_row - 1, 16))
    return min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0**doublings)


def push_pause_seconds(last_seconds: float, *, are_joined: bool, has_news: bool) -> float:
    """Until the routers are told again. `has_news`: the places changed, or routers reached more or fewer of them."""
    if are_joined:
        return PUSH_SECONDS
    return JOINING_SECONDS if has_news else min(PUSH_SECONDS, 2 * last_seconds)


class Supervisor:
    """The actor. Every loop of its life is a child of one task group that its constructor starts."""

    def __init__(self, spec: ClusterSpec) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._spec = spec
        self._places = places_of(spec)
        self._actors: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._wanted = {place.name: asyncio.Event() for place in self._places}
        """Set for one that is to be started again although it was taken out."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep_all())
        self._keeping.add_done_callback(_end_unless_cancelled)

    def __repr__(self) -> str:
        return f"supervisor({self._spec.num_workers} workers, {self._spec.num_routers} routers)"

    async def report(self) -> SupervisorReport:
        return SupervisorReport(pid=os.getpid(), places=self._places)

    async def shut_down(self, grace_seconds: float) -> None:
        """Routers finish their streams, workers say goodbye, all end. The caller ends the supervisor."""
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        routers, workers = self._actors_of("router"), self._actors_of("worker")
        await _all(
            *(_answer(actor.stop.remote(grace_seconds), grace_seconds + CALL_SECONDS) for actor in routers)
        )
        await _all(*(_answer(actor.stop.remote(0.0), CALL_SECONDS) for actor in workers))
        for actor in (*routers, *workers):
            self._kill(actor)

    async def restart(self, name: str, grace_seconds: float) -> None:
        """Drains, stops and starts one afresh; one that was taken out is started. Returns once it is in use again: a
        worker when every router gives it requests, a router when it has every worker. Raises ValueError for an unknown
        name, RuntimeError where it does not come back."""
        place = next((place for place in self._places if place.name == name), None)
        if place is None:
            known = ", ".join(place.name for place in self._places)
            raise ValueError(f"no worker or router is called {name!r}, only {known}")
        num_starts = place.num_starts
        actor = self._actors.get(name)
        if place.is_up and actor is not None:
            logger.info("%s is restarted: it drains first", name)
            place.phase, place.is_leaving = "draining", True
            self._changed.set()
            await _all(_answer(actor.stop.remote(grace_seconds), grace_seconds + GOODBYE_SECONDS))
            self._kill(actor)
        self._wanted[name].set()
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._until_in_use(place, num_starts)
        except TimeoutError:
            raise RuntimeError(f"{name} was not in use again within {START_SECONDS:.0f} s") from None

    def _kill(self, actor: Any) -> None:
        ray.kill(actor)

    async def _until_in_use(self, place: Place, num_starts: int) -> None:
        """By a start after so many."""
        while place.num_starts == num_starts or not await self._is_in_use(place):
            if place.num_starts == num_starts and place.num_failures_in_a_row >= MAX_FAILED_STARTS:
                raise RuntimeError(f"{place.name} does not start again: {place.error}")
            await asyncio.sleep(LOOK_SECONDS)

    async def _is_in_use(self, place: Place) -> bool:
        """Whether every router gives requests to every worker that serves, as far as this place is concerned."""
        if place.phase != "serving":
            return False
        serving = [other for other in self._places if other.phase == "serving"]
        routers = [other for other in serving if other.kind == "router"]
        workers = [other for other in serving if other.kind == "worker"]
        needed = {place.incarnation} if place.kind == "worker" else {worker.incarnation for worker in workers}
        asked = routers if place.kind == "worker" else [place]
        try:
            ready = [
                await _answer(self._actors[router.name].ready_incarnations.remote(), CALL_SECONDS)
                for router in asked
            ]
        except (RayActorError, RayTaskError, TimeoutError, KeyError):
            return False  # It has ended meanwhile, which its own loop finds out.
        return all(needed <= set(incarnations) for incarnations in ready)

    async def _keep_all(self) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._keep_routers_informed())
            loops.create_task(self._watch_drains())
            for place in self._places:
                loops.create_task(self._keep(place))

    async def _keep(self, place: Place) -> None:
        while True:
            place.phase, place.serving_since = "starting", None
            try:
                await self._run_once(place)
            except Exception as error:  # Whatever went wrong, the answer is the same: another try, later.
                place.error = "" if place.is_leaving else _reason(error)
                logger.warning("%s ended: %s", place.name, place.error or "it was told to")
            was_taken_out = place.was_taken_out
            place.phase, place.num_ready_workers = "waiting", 0
            self._changed.set()
            # A call of ours may be what failed, while the actor lives: a new incarnation needs the name.
            if (actor := self._actors.pop(place.name, None)) is not None:
                self._kill(actor)
            if was_taken_out:
                await self._until_wanted(place)
            place.num_failures_in_a_row = self._failures_in_a_row(place)
            place.is_leaving = False
            await asyncio.sleep(backoff_seconds(place.num_failures_in_a_row))

    async def _until_wanted(self, place: Place) -> None:
        place.phase = "stopped"
        self._wanted[place.name].clear()
        await self._wanted[place.name].wait()

    def _failures_in_a_row(self, place: Place) -> int:
        if place.is_leaving:
            return 0
        since = place.serving_since
        steady = since is not None and time.monotonic() - since > STEADY_SECONDS
        return 1 if steady else place.num_failures_in_a_row + 1

    async def _run_once(self, place: Place) -> None:
        """Adopts the actor of this name or makes it; raises RayError when it dies."""
        actor = self._actors[place.name] = self._adopt_or_create(place)
        started = await _answer(actor.start.remote(), START_SECONDS)
        place.address, place.pid, place.node_id = started.address, started.pid, started.node_id
        place.incarnation = started.incarnation if isinstance(started, StartedWorker) else ""
        place.num_starts += 1
        place.phase, place.serving_since = "serving", time.monotonic()
        logger.info("%s serves at %s", place.name, place.address)
        self._changed.set()
        await actor.until_stopped.remote()

    def _adopt_or_create(self, place: Place) -> Any:
        options = {
            "name": place.name,
            "namespace": self._spec.namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": 0,
        }
        if place.kind == "worker":
            config = replace(self._spec.worker, worker_id=place.name)
            resources = {
                "num_cpus": self._spec.num_cpus_per_worker,
                "num_gpus": self._spec.num_gpus_per_worker,
            }
            return ray.remote(WorkerActor).options(**options, **resources).remote(config)
        router = replace(self._spec.router, port=router_port(self._spec.router, place))
        return ray.remote(RouterActor).options(**options, num_cpus=0).remote(router, place.name)

    async def _keep_routers_informed(self) -> None:
        pause_seconds = PUSH_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._changed.wait()
            has_news = self._changed.is_set()
            self._changed.clear()
            workers = [place for place in self._places if place.kind == "worker" and place.is_up]
            routers = [place for place in self._places if place.kind == "router" and place.phase == "serving"]
            # One that drains keeps its streams.
            addresses = [place.address for place in workers]
            num_serving = sum(place.phase == "serving" for place in workers)
            before = [place.num_ready_workers for place in routers]
            await _all(*(self._inform(place, addresses) for place in routers))
            after = [place.num_ready_workers for place in routers]
            pause_seconds = push_pause_seconds(
                pause_seconds,
                are_joined=all(num_ready >= num_serving for num_ready in after),
                has_news=has_news or after != before,
            )

    async def _watch_drains(self) -> None:
        """A router may have passed on an operator's word: the worker itself knows."""
        while True:
            await asyncio.sleep(PUSH_SECONDS)
            await _all(*(self._look(place) for place in self._places if place.kind == "worker"))

    async def _look(self, worker: Place) -> None:
        if not worker.is_up or worker.is_leaving:
            return
        actor = self._actors[worker.name]
        is_draining = await _answer(actor.is_draining.remote(), PUSH_SECONDS)
        if worker.is_up and not worker.is_leaving and self._actors.get(worker.name) is actor:
            worker.phase = "draining" if is_draining else "serving"

    async def _inform(self, router: Place, addresses: list[str]) -> None:
        actor = self._actors[router.name]
        num_ready_workers = await _answer(actor.set_workers.remote(addresses), PUSH_SECONDS)
        # It may have ended meanwhile: what it reached is lost, and says nothing of its successor.
        if self._actors.get(router.name) is actor:
            router.num_ready_workers = num_ready_workers

    def _actors_of(self, kind: Kind) -> list[Any]:
        return [
            self._actors[place.name]
            for place in self._places
            if place.kind == kind and place.name in self._actors
        ]


def _end_unless_cancelled(keeping: asyncio.Task[None]) -> None:
    """A supervisor that no longer supervises is worse than a dead one, which Ray starts again."""
    if not keeping.cancelled():
        logger.error("supervision failed", exc_info=keeping.exception())
        os._exit(1)


async def _answer(reference: Awaitable[Reply], timeout_seconds: float) -> Reply:
    async with asyncio.timeout(timeout_seconds):
        return await reference


async def _all(*calls: Awaitable[object]) -> None:
    """Waits for each; who has died or hangs is found out by its own `until_stopped`, not here."""
    await asyncio.gather(*calls, return_exceptions=True)


def _reason(error: Exception) -> str:
    match error:
        case RayTaskError():
            return f"{type(error.cause).__name__}: {error.cause}"
        case RayActorError():
            return "its process died"
        case TimeoutError():
            return f"did not start within {START_SECONDS:.0f} s"
        case _:
            return f"{type(error).__name__}: {error}"
