"""Keeps a cluster's workers and routers alive: one detached Ray actor.

Owns who should run, who does, and the pause before another try. Does not own serving: it may die at any moment and Ray
restarts it (max_restarts=-1); it adopts the running by name, and all that it must not forget is the desired of its
operators (desired_state.py). Workers and routers are detached actors of max_restarts=0: a death is seen in
milliseconds, where Ray's own restart takes more than a second.

The phases of a place are in replicas.py. A worker that was drained and has died is one that its operator took out: it
is not started again by itself. One that retires because the cluster shrinks drains, ends, and has no place any more.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from blockyard.deploy.dashboard.announcement import key_of
from blockyard.deploy.supervision.actors import (
    CALL_SECONDS,
    START_SECONDS,
    adopt_or_create,
    all_of,
    answer,
    death_told,
    end_process,
    is_actor,
    living_names,
    reason,
)
from blockyard.deploy.supervision.announcing import keep_announced, put, withdraw
from blockyard.deploy.supervision.desired_state import DesiredState, DesiredStateStore, RayDesiredStateStore
from blockyard.deploy.supervision.incidents import ended_line, serves_line
from blockyard.deploy.supervision.joining import Joining
from blockyard.deploy.supervision.liveness import STARTING_SECONDS, HungError, Pulse
from blockyard.deploy.supervision.replicas import (
    PUSH_SECONDS,
    ClusterSpec,
    Kind,
    Place,
    SupervisorReport,
    backoff_seconds,
    check_code,
    number_of,
    places_of,
    taken_out_of,
    worker_name,
)
from blockyard.deploy.supervision.reports import NAMESPACE, keep_reported
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.runtime.logs import configure_logging
from blockyard.proto.runtime.sigterm import end_at_sigterm
from blockyard.router.actor import StartedRouter
from blockyard.worker.actor import StartedWorker

logger = logging.getLogger(__name__)

STEADY_SECONDS = 30.0
"""Who has served so long is forgiven the deaths before."""
GOODBYE_SECONDS = 30.0
"""Beyond its grace, for one that stops: the step under way has to end."""


class Supervisor:
    """The actor. Every loop of its life is a child of one task group that its constructor starts."""

    def __init__(self, spec: ClusterSpec, store: DesiredStateStore | None = None) -> None:
        end_at_sigterm()
        configure_logging(spec.router.log)
        self._spec = spec
        self._code = code_version()
        self._store = store or RayDesiredStateStore(spec.namespace)
        self._desired = self._store.load() or DesiredState(num_workers=spec.num_workers)
        self._places = places_of(spec, self._desired.num_workers)
        self._actors: dict[str, Any] = {}
        self._pulses: dict[str, Pulse] = {}
        """Of those that run or start."""
        self._changed = asyncio.Event()
        self._joining = Joining(places=self._places, actors=self._actors, changed=self._changed)
        self._wanted = {place.name: asyncio.Event() for place in self._places}
        """Set for one that is to be started again although it was taken out."""
        self._find_what_was_before()
        self._one_scaling_at_a_time, self._one_memory_at_a_time = asyncio.Lock(), asyncio.Lock()
        self._loops: asyncio.TaskGroup | None = None
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._keeping = asyncio.get_running_loop().create_task(self._keep_all())
        self._keeping.add_done_callback(_end_unless_cancelled)

    def __repr__(self) -> str:
        return f"supervisor({self._spec.num_workers} workers, {self._spec.num_routers} routers)"

    async def report(self) -> SupervisorReport:
        return self._report()

    def _report(self) -> SupervisorReport:
        return SupervisorReport(
            pid=os.getpid(),
            code=self._code,
            places=self._places,
            cpus_per_worker=self._spec.num_cpus_per_worker,
            gpus_per_worker=self._spec.num_gpus_per_worker,
            at_seconds=time.monotonic(),
        )

    async def shut_down(self, grace_seconds: float) -> None:
        """Routers finish their streams, workers say goodbye, all end. The caller ends the supervisor."""
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        name = self._spec.router.cluster
        await all_of(withdraw(name), withdraw(name, NAMESPACE), self._store.forget())
        routers, workers = self._actors_of("router"), self._actors_of("worker")
        await all_of(
            *(answer(actor.stop.remote(grace_seconds), grace_seconds + CALL_SECONDS) for actor in routers)
        )
        await all_of(*(answer(actor.stop.remote(0.0), CALL_SECONDS) for actor in workers))
        for actor in (*routers, *workers):
            self._kill(actor)

    async def restart(self, name: str, grace_seconds: float) -> None:
        """Drains, stops and starts one afresh; one that was taken out is started. Returns once it is in use again: a
        worker when every router gives it requests, a router when it has every worker. Raises ValueError for an unknown
        name, RuntimeError where it does not come back."""
        place = next((place for place in self._places if place.name == name and not place.is_retiring), None)
        if place is None:
            known = ", ".join(place.name for place in self._places)
            raise ValueError(f"no worker or router is called {name!r}, only {known}")
        num_starts = place.num_starts
        await self._stop(place, grace_seconds)
        self._wanted[name].set()
        await self._joining.wait_until_in_use(place, num_starts)

    async def scale(self, num_workers: int, grace_seconds: float) -> None:
        """To so many workers. Returns once each new one is in use and those beyond, the highest numbers, are gone: they
        drain first, all at once, so that none hands its requests to another that leaves. One that was taken out counts,
        and stays out. Raises ValueError for less than one, RuntimeError where a new one does not start: it is tried
        on."""
        if num_workers < 1:
            raise ValueError(f"a cluster needs at least one worker, not {num_workers}")
        async with self._one_scaling_at_a_time:
            await self._remember(num_workers=num_workers, grace_seconds=grace_seconds)
            logger.info("the cluster scales to %d workers", num_workers)
            known = {place.name for place in self._workers()}
            for name in map(worker_name, range(num_workers)):
                if name not in known:
                    self._add(Place(name=name, kind="worker"))
            await self._retire_those_beyond()
            new = [place for place in self._workers() if place.num_starts == 0 and place.phase != "stopped"]
            for place in new:  # What failed for who asked before may have been mended.
                place.num_failures_in_a_row, place.error, place.failed_at = 0, "", None
        # Without the lock: whoever waits for a node that does not come can shrink the cluster again.
        await self._joining.wait_until_all_in_use(new)

    def _kill(self, actor: Any) -> None:
        ray.kill(actor)

    def _end_process(self, place: Place) -> None:
        end_process(place.node_id, place.pid)

    def _living(self) -> frozenset[str]:
        return living_names()

    def _find_what_was_before(self) -> None:
        """After a death of ours: those taken out stay out, and those that were leaving go on to leave."""
        known = {name: addresses for name, *addresses in self._desired.addresses}
        for place in self._places:
            if place.name in known:
                place.address, place.http_address = known[place.name]
        living = self._living()
        self._found = set(living)
        for place in self._workers():
            if place.name in self._desired.taken_out and place.name not in living:
                place.phase = "stopped"
        for name in sorted(living - {place.name for place in self._places}):
            if name.startswith("worker-"):
                self._actors[name] = self._adopt(name)
                self._wanted[name] = asyncio.Event()
                self._places.append(Place(name=name, kind="worker", phase="draining", is_leaving=True))

    def _adopt(self, name: str) -> Any:
        return ray.get_actor(name)

    def _workers(self) -> list[Place]:
        return [place for place in self._places if place.kind == "worker"]

    def _add(self, place: Place) -> None:
        self._places.insert(len(self._workers()), place)
        self._wanted[place.name] = asyncio.Event()
        if self._loops is not None:
            self._keepers[place.name] = self._loops.create_task(self._keep(place))

    async def _remember(self, **changes: Any) -> None:
        async with self._one_memory_at_a_time:
            desired = replace(self._desired, **changes)
            await self._store.save(desired)
            self._desired = desired

    async def _remember_addresses(self) -> None:
        """Of routers: where all of Ray is started again, nobody else knows them."""
        routers = (place for place in self._places if place.kind == "router" and place.address)
        addresses = tuple((place.name, place.address, place.http_address) for place in routers)
        if addresses != self._desired.addresses:
            await self._remember(addresses=addresses)

    async def _stop(self, place: Place, grace_seconds: float) -> None:
        """Its keeper sees the end."""
        actor = self._actors.get(place.name)
        if not place.is_up or actor is None:
            return
        place.phase, place.is_leaving = "draining", True
        self._changed.set()
        await all_of(answer(actor.stop.remote(grace_seconds), grace_seconds + GOODBYE_SECONDS))
        self._kill(actor)

    async def _retire_those_beyond(self) -> None:
        beyond = [place for place in self._workers() if number_of(place.name) >= self._desired.num_workers]
        async with asyncio.TaskGroup() as retirements:
            for place in beyond:
                place.is_retiring = True
                retirements.create_task(self._retire(place, self._desired.grace_seconds))

    async def _retire(self, place: Place, grace_seconds: float) -> None:
        await self._stop(place, grace_seconds)
        if (keeper := self._keepers.pop(place.name, None)) is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        if (actor := self._actors.pop(place.name, None)) is not None:
            self._kill(actor)
        self._places.remove(place)
        self._changed.set()

    async def _finish_scaling(self) -> None:
        async with self._one_scaling_at_a_time:
            await self._retire_those_beyond()

    async def _keep_all(self) -> None:
        async with asyncio.TaskGroup() as self._loops:
            self._loops.create_task(self._joining.keep_routers_informed())
            self._loops.create_task(self._watch_all())
            self._loops.create_task(self._finish_scaling())
            self._loops.create_task(self._announce())
            self._loops.create_task(self._store_reports())
            for place in self._places:
                if not place.is_leaving:
                    self._keepers[place.name] = self._loops.create_task(self._keep(place))

    async def _announce(self) -> None:
        await keep_announced(self._spec.router, self._places)

    async def _store_reports(self) -> None:
        key = key_of(self._spec.router.cluster)
        await keep_reported(self._report, lambda text: put(key, text, NAMESPACE))

    async def _keep(self, place: Place) -> None:
        if place.phase == "stopped":
            await self._until_wanted(place)
        while True:
            place.phase, place.serving_since = "starting", None
            try:
                await self._run_once(place)
            except Exception as error:  # Whatever went wrong, the answer is the same: another try, later.
                place.error = "" if place.is_leaving else reason(error)
                place.failed_at = time.monotonic() if place.error else None
                logger.warning("%s", ended_line(place.name, place.error))
                if isinstance(error, HungError | TimeoutError) and place.pid:
                    self._end_process(place)
            if place.is_retiring:
                return
            was_taken_out = place.was_taken_out
            place.phase, place.num_ready_workers, place.num_missed = "waiting", 0, 0
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
        """Adopts the actor of this name or makes it; raises DiedError when it dies, HungError when it hangs."""
        place.pid, place.node_id = 0, ""
        actor = self._actors[place.name] = adopt_or_create(self._spec, place)
        async with self._pulse(place, actor) as pulse, death_told() as death:
            if place.name in self._found:
                self._found.discard(place.name)
                pulse.patience_seconds = STARTING_SECONDS
            whereabouts = answer(actor.whereabouts.remote(), START_SECONDS)
            place.node_id, place.pid = await pulse.unless_hung(whereabouts)
            if place.node_id == ray.get_runtime_context().get_node_id() and is_actor(place.pid):
                death.watch(place.pid)
            if place.kind == "worker":
                if not Path(self._spec.worker.engine.model).is_absolute():
                    place.phase = "downloading"
                await pulse.unless_hung(actor.fetch_model.remote())
                place.phase = "starting"
            self._has_started(place, await pulse.unless_hung(answer(actor.start.remote(), START_SECONDS)))
            await all_of(self._remember_addresses())
            pulse.patience_seconds = self._spec.hung_seconds
            await pulse.unless_hung(actor.until_stopped.remote())

    @contextlib.asynccontextmanager
    async def _pulse(self, place: Place, actor: Any) -> AsyncIterator[Pulse]:
        """Looked at by `_watch_all` while its place is in there."""
        question = actor.is_draining if place.kind == "worker" else actor.ready_incarnations
        pulse = self._pulses[place.name] = Pulse(question.remote)
        try:
            yield pulse
        finally:
            del self._pulses[place.name]
            await pulse.stop()

    def _has_started(self, place: Place, started: StartedWorker | StartedRouter) -> None:
        place.address, place.pid, place.node_id = started.address, started.pid, started.node_id
        place.incarnation = started.incarnation if isinstance(started, StartedWorker) else ""
        place.dtype = started.dtype if isinstance(started, StartedWorker) else ""
        place.http_address = "" if isinstance(started, StartedWorker) else started.http_address
        place.code = started.code
        check_code(place, self._spec.code)
        place.num_starts += 1
        place.phase, place.serving_since = "serving", time.monotonic()
        logger.info("%s", serves_line(place.name, place.address))
        self._changed.set()

    async def _watch_all(self) -> None:
        """Who hangs, and which worker drains: a router may have passed on an operator's word."""
        while True:
            await asyncio.sleep(PUSH_SECONDS)
            await all_of(*(self._look(place, pulse) for place, pulse in self._looked_at()))
            taken_out = taken_out_of(self._workers(), self._desired.taken_out)
            if taken_out != self._desired.taken_out:
                # If it fails now, the next look tries again.
                await all_of(self._remember(taken_out=taken_out))

    def _looked_at(self) -> list[tuple[Place, Pulse]]:
        """One that leaves has a deadline of its own."""
        return [
            (place, self._pulses[place.name])
            for place in self._places
            if place.name in self._pulses and not place.is_leaving
        ]

    async def _look(self, place: Place, pulse: Pulse) -> None:
        answered = await pulse.look()
        if self._pulses.get(place.name) is not pulse or place.is_leaving:
            return
        place.num_missed = pulse.num_missed
        if place.kind == "worker" and place.is_up and answered is not None:
            place.phase = "draining" if answered else "serving"

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
