"""Keeps a cluster's workers and routers alive: one detached Ray actor.

Owns which workers and routers should run, which do run, and the pause before a restart. Does not own serving: the
supervisor may die at any moment, and Ray restarts it (max_restarts=-1). It adopts running actors by name. All that must
survive its death is the desired state (desired_state.py). Workers and routers are detached actors with max_restarts=0,
because the supervisor sees a death in milliseconds and Ray's own restart takes more than a second.

It acts only while it leads (leadership.py). Ray's head ends an actor only after that has said that it is over, so a
late kill does no harm. A silent process is ended by a task on its own node, which asks it and the head once more.

The phases of a replica are in replicas.py. A worker that was drained and has ended counts as taken out by its operator:
only the operator restarts it. A worker that retires because the cluster shrinks drains, ends, and is removed.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import ray
from blockyard.deploy.dashboard.announcement import key_of
from blockyard.deploy.supervision.actors import (
    CALL_SECONDS,
    START_SECONDS,
    UnreachableError,
    adopt_or_create,
    all_of,
    answer,
    deaths_as_errors,
    end_process,
    is_actor,
    living_names,
    reason,
)
from blockyard.deploy.supervision.announcing import keep_announced, put, withdraw
from blockyard.deploy.supervision.desired_state import DesiredStateStore, RayDesiredStateStore
from blockyard.deploy.supervision.goal import REPLACED, Goal
from blockyard.deploy.supervision.incidents import ended_line, serves_line
from blockyard.deploy.supervision.joining import Joining
from blockyard.deploy.supervision.leadership import (
    RETRY_SECONDS,
    Epochs,
    Leadership,
    NotLeadingError,
    RayEpochs,
    SilentHeadError,
    claim_at_last,
)
from blockyard.deploy.supervision.liveness import STARTING_SECONDS, HealthChecks
from blockyard.deploy.supervision.model_plans import ModelPlan
from blockyard.deploy.supervision.placing import free, free_all_but, place
from blockyard.deploy.supervision.replicas import (
    PUSH_SECONDS,
    ClusterSpec,
    Kind,
    Replica,
    SupervisorReport,
    backoff_seconds,
    check_code,
    is_worker_name,
    taken_out_of,
)
from blockyard.deploy.supervision.reports import NAMESPACE, keep_reported
from blockyard.proto.index.erase import erase_index
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.runtime.logs import configure_logging
from blockyard.proto.runtime.niceness import take_usual_priority
from blockyard.proto.runtime.sigterm import end_at_sigterm
from blockyard.proto.runtime.tasks import BackgroundTasks, cancel_and_wait, log_failure
from blockyard.router.actor import StartedRouter
from blockyard.router.config import ServedModel
from blockyard.worker.actor import StartedWorker
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

T = TypeVar("T")
logger = logging.getLogger(__name__)

STEADY_SECONDS = 30.0
"""After serving for this long, a replica's next failure counts as the first in a row."""
FILES_SECONDS = 60.0
"""Time for a worker to compare the files at its path with those that it read. It may have to read all weights."""
GOODBYE_SECONDS = 30.0
"""Time beyond the grace period for a replica to stop, because the current step has to end."""


class Supervisor:
    """The supervisor's actor. All its loops are children of one task group, which its constructor starts."""

    def __init__(
        self, spec: ClusterSpec, store: DesiredStateStore | None = None, epochs: Epochs | None = None
    ) -> None:
        end_at_sigterm()
        configure_logging(spec.router.log)
        take_usual_priority()
        self._spec = spec
        self._code = code_version()
        claim = claim_at_last(epochs or RayEpochs(spec.namespace))
        self._lead = Leadership(claim, in_thread=self._in_thread, give_way=self._give_way)
        self._store = store or RayDesiredStateStore(spec.namespace, claim.number)
        self._goal = Goal(spec, self._store, self._lead.confirm)
        self._replicas = self._goal.replicas()
        self._actors: dict[str, Any] = {}
        self._health = HealthChecks()
        self._changed = asyncio.Event()
        self._joining = Joining(
            replicas=self._replicas,
            actors=self._actors,
            changed=self._changed,
            models=lambda: self._goal.models.served,
            lead=self._lead,
        )
        self._wanted = {replica.name: asyncio.Event() for replica in self._replicas}
        """Events by a replica's name. `restart` sets one to start a replica that was taken out."""
        self._find_what_was_before()
        self._one_scaling_at_a_time = asyncio.Lock()
        self._loops: asyncio.TaskGroup | None = None
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks(on_failure=_exit_for_restart)
        self._tasks.start(self._keep_all(), name="supervision")

    def __repr__(self) -> str:
        return f"supervisor({self._spec.num_workers} workers, {self._spec.num_routers} routers)"

    async def report(self) -> SupervisorReport:
        return self._report()

    def _report(self) -> SupervisorReport:
        return SupervisorReport(
            pid=os.getpid(),
            code=self._code,
            replicas=self._replicas,
            cpus_per_worker=self._spec.num_cpus_per_worker,
            gpus_per_worker=self._spec.num_gpus_per_worker,
            models=tuple(model.id for model in self._goal.models.served),
            further_shares={
                plan.id: (plan.num_cpus_per_worker, plan.num_gpus_per_worker)
                for plan in self._goal.models.further
            },
            at_seconds=time.monotonic(),
        )

    async def shut_down(self, grace_seconds: float) -> None:
        """End all routers and workers, and delete the cluster's entries in Ray's store. The caller ends this actor.

        Routers first finish their streams, for at most `grace_seconds`. Then workers deregister.

        Raise NotLeadingError, and change nothing, if this supervisor does not lead.
        """
        await self._lead.confirm()
        await self._tasks.aclose()
        routers, workers = self._actors_of("router"), self._actors_of("worker")
        await all_of(
            *(
                answer(actor.stop.remote(grace_seconds, self._lead.claim.check), grace_seconds + CALL_SECONDS)
                for actor in routers
            )
        )
        await all_of(
            *(answer(actor.stop.remote(0.0, self._lead.claim.check), CALL_SECONDS) for actor in workers)
        )
        await self._lead.confirm()
        for actor in (*routers, *workers):
            self._kill(actor)
        self._free_all_but(())
        # Last, so that a `down` that was interrupted can be given again.
        name = self._spec.router.cluster
        await all_of(withdraw(name), withdraw(name, NAMESPACE), self._store.forget())

    async def restart(self, name: str, grace_seconds: float) -> None:
        """Drain, stop and start a worker or router. If it was taken out, only start it.

        Return once it is in use: a worker when every router sends it requests, a router when it has every worker.
        Raise ValueError for an unknown name, RuntimeError if it does not come back. Raise RuntimeError with nothing
        stopped if the files of a model have changed: the others that serve it would not serve beside new ones.
        """
        replica = self._known(name)
        # A router reads files of all models.
        asked = [replica] if replica.kind == "worker" else self._first_workers()
        await self._check_files(asked, f"{name} was not stopped")
        num_starts = replica.num_starts
        await self._stop(replica, grace_seconds)
        self._wanted[name].set()
        await self._joining.wait_until_in_use(replica, num_starts)

    async def restart_at_once(self, names: Sequence[str], grace_seconds: float) -> None:
        """Drain, stop and start these workers, all at once, so that they read files that have changed.

        Meanwhile their models are not served. Raise as `restart` does, but for changed files.
        """
        replicas = [self._known(name) for name in names]
        num_starts = [replica.num_starts for replica in replicas]
        await all_of(*(self._stop_at_last(replica, grace_seconds) for replica in replicas))
        for name in names:
            self._wanted[name].set()
        for replica, number in zip(replicas, num_starts, strict=True):
            await self._joining.wait_until_in_use(replica, number)

    def _known(self, name: str) -> Replica:
        """Return the worker or router of this name. Raise ValueError for an unknown one."""
        for replica in self._replicas:
            if replica.name == name and not replica.is_retiring:
                return replica
        known = ", ".join(replica.name for replica in self._replicas)
        raise ValueError(f"no worker or router is called {name!r}, only {known}")

    async def _check_files(self, workers: Iterable[Replica], undone: str) -> None:
        """Raise RuntimeError if the files of one of these workers have changed since it read them.

        `undone` says what was therefore not done. A worker that serves nothing, or does not answer, is not asked.
        """
        for worker in filter(self._serves, workers):
            changed = ""
            try:
                changed = await answer(self._actors[worker.name].changed_files.remote(), FILES_SECONDS)
            except TimeoutError:
                changed = (
                    f"the files of {worker.model} were written, and to compare them takes long: try again"
                )
            except RayError:
                pass  # It has just ended.
            if changed:
                raise RuntimeError(
                    f"{changed}. {undone}. Workers with new files are refused while others serve {worker.model} from "
                    f"the old ones. `blockyard model update {worker.model}` serves the new files without a pause, "
                    "`blockyard restart --new-files` with one"
                )

    def _serves(self, worker: Replica) -> bool:
        answers = worker.is_up and not worker.num_missed
        return answers and not worker.refusal and worker.name in self._actors

    def _first_workers(self) -> list[Replica]:
        """Return one worker that serves of each model."""
        return list({worker.model: worker for worker in self._workers() if self._serves(worker)}.values())

    async def scale(self, num_workers: int, grace_seconds: float, model: str = "") -> None:
        """Scale a model, or the first that is served, to this many workers.

        Return once new workers are in use and those of higher numbers are gone.

        Surplus workers drain first, all at once, so that none hands its requests to another that leaves. A worker that
        was taken out counts and stays out. Raise ValueError for less than one worker, RuntimeError if a new one does
        not start. The supervisor keeps trying to start it. Raise RuntimeError with nothing changed if workers would be
        added and the model's files have changed.
        """
        async with self._one_scaling_at_a_time:
            model = model or self._goal.models.served[0].id
            if num_workers > sum(worker.model == model for worker in self._workers()):
                asked = [worker for worker in self._first_workers() if worker.model == model]
                await self._check_files(asked, f"no worker of {model} was added")
            model = await self._goal.scale(model, num_workers, grace_seconds)
            logger.info("%s scales to %d workers", model, num_workers)
            self._add_missing()
            await self._retire_those_beyond()
            new = self._never_served(model)
            for replica in new:  # The cause of failures before this call may have been fixed.
                replica.num_failures_in_a_row, replica.error, replica.failed_at = 0, "", None
        # Without the lock, so that an operator can shrink the cluster again while a new worker waits for a node.
        await self._joining.wait_until_all_in_use(new)

    async def plan_model(
        self,
        model: ServedModel,
        num_workers: int,
        settings: Mapping[str, Any] | None = None,
        cpus_per_worker: float | None = None,
    ) -> ModelPlan:
        """Return the plan of one more model, as Goal.plan does, and change nothing.

        Raise ValueError for the name of an adapter, too.
        """
        if taken := sorted(set(model.names) & await self._joining.adapter_names()):
            raise ValueError(
                f"{taken[0]!r} is the name of an adapter: remove that (`blockyard lora remove`), or give --name"
            )
        return self._goal.plan(model, num_workers, settings, cpus_per_worker)

    async def add_model(self, plan: ModelPlan) -> None:
        """Serve one more model. Return once all routers use all of its workers.

        Raise ValueError for a name that another model has, RuntimeError if a worker does not start.
        """
        async with self._one_scaling_at_a_time:
            await self._goal.add(plan)
            logger.info("the cluster serves %s too, with %d workers", plan.id, plan.num_workers)
            self._add_missing()
            self._changed.set()
        await self._joining.wait_until_all_in_use(self._never_served(plan.id))

    async def remove_model(self, model: str, grace_seconds: float) -> None:
        """Stop serving a model. Its running requests have the grace period. Return once its workers are gone.

        Raise ValueError for an unknown model, and for the last one.
        """
        async with self._one_scaling_at_a_time:
            removed = await self._goal.remove(model, grace_seconds)
            logger.info("the cluster does not serve %s any more", model)
            # First the routers: they refuse new requests, and running ones end on the workers as ever.
            await self._joining.stop_serving(self._goal.models.served, grace_seconds)
            await self._retire_those_beyond()
            if (urls := self._spec.worker.redis_url) is not None:
                await erase_index(urls, self._spec.worker.cluster, model=removed.index)

    def plan_update(self, model: str, path: str | None, num_workers: int | None) -> ModelPlan:
        """Return the plan of an update, as Goal.plan_update does, and change nothing."""
        return self._goal.plan_update(model, path, num_workers)

    async def update_model(self, plan: ModelPlan, grace_seconds: float) -> None:
        """Start other workers for a model beside its own, have routers serve it from them, and end those of before.

        Running requests end on the workers of before, within the grace period. Raise RuntimeError if a worker does not
        start, or a router cannot serve the new files: then everything is as before.
        """
        async with self._one_scaling_at_a_time:
            if plan.generation != self._goal.plan_update(plan.id, None, None).generation:
                raise RuntimeError(f"{plan.id} was updated meanwhile: try again")
            before, served = self._goal.desired, self._goal.models.known(plan.id)
            self._goal.update = plan
            self._add_missing()
            new = [worker for worker in self._workers() if worker.name.startswith(plan.workers_prefix)]
            logger.info("%s is updated: %d other workers start", plan.id, len(new))
            try:
                await self._joining.wait_until_serving(new)
                await self._goal.finish_update(grace_seconds)
                self._rename_models()
                await self._joining.wait_until_all_in_use(new)
            except BaseException as error:
                logger.error("%s is not updated: %s", plan.id, error)
                self._goal.update = None
                if self._goal.models.known(plan.id) != served:
                    self._goal.desired = replace(
                        self._goal.desired,
                        serves_first=before.serves_first,
                        further_models=before.further_models,
                    )
                    self._goal.is_stored = False
                    await self._store_at_last()
                self._rename_models()
                await self._joining.stop_serving(self._goal.models.served, grace_seconds)
                await self._retire_those_beyond()
                raise
            await self._retire_those_beyond()
            if (urls := self._spec.worker.redis_url) is not None:
                await erase_index(urls, self._spec.worker.cluster, model=served.index)

    def _rename_models(self) -> None:
        """Give each worker the model that it serves now, and tell the routers."""
        models = {replica.name: replica.model for replica in self._goal.replicas()}
        for worker in self._workers():
            worker.model = models.get(worker.name, f"{worker.model.removesuffix(REPLACED)}{REPLACED}")
        self._changed.set()

    def _add_missing(self) -> None:
        """Add the workers that should run and are not there yet."""
        known = {replica.name for replica in self._replicas}
        for replica in self._goal.replicas():
            if replica.name not in known:
                self._add(replica)

    def _never_served(self, model: str) -> list[Replica]:
        return [
            replica
            for replica in self._workers()
            if replica.model == model and replica.num_starts == 0 and replica.phase != "stopped"
        ]

    def _kill(self, actor: Any) -> None:
        ray.kill(actor)

    async def _end_process(self, replica: Replica, actor: Any, *, if_silent: bool) -> bool:
        """Kill a process that does not answer. Return whether it was killed."""
        return await end_process(actor, replica.node_id, replica.pid, self._lead.claim, if_silent=if_silent)

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call a function of Ray that waits for Ray's head."""
        return await asyncio.to_thread(call, *arguments)

    def _give_way(self) -> NoReturn:
        """End this process, and with it every call that still waits for a connection."""
        os._exit(0)

    async def _end_silent(self, replica: Replica, actor: Any, *, if_silent: bool = True) -> bool:
        """End a process that does not answer. Return False if that was not possible, or not allowed."""
        try:
            await self._lead.confirm()
        except SilentHeadError:
            return False
        return await self._end_process(replica, actor, if_silent=if_silent)

    async def _end(self, actor: Any) -> None:
        """Have Ray end an actor that has said that it is over. A kill that comes late then does no harm."""
        with contextlib.suppress(SilentHeadError):
            await self._lead.confirm()
            await self._in_thread(self._kill, actor)

    def _living(self) -> frozenset[str]:
        return living_names()

    def _find_what_was_before(self) -> None:
        """Take over from the last incarnation of this actor: addresses of routers, and which workers were taken out.

        Adopt running workers beyond the desired number too. They go on leaving.
        """
        known = {name: addresses for name, *addresses in self._goal.desired.addresses}
        for replica in self._replicas:
            if replica.name in known:
                replica.address, replica.http_address = known[replica.name]
        living = self._living()
        self._found = set(living)
        self._free_all_but(living)
        for replica in self._workers():
            if replica.name in self._goal.desired.taken_out and replica.name not in living:
                replica.phase = "stopped"
        for name in sorted(living - {replica.name for replica in self._replicas}):
            if is_worker_name(name):
                self._actors[name] = self._adopt(name)
                self._wanted[name] = asyncio.Event()
                model = self._goal.model_of(name)
                self._replicas.append(
                    Replica(name=name, kind="worker", model=model, phase="draining", is_leaving=True)
                )

    def _adopt(self, name: str) -> Any:
        return ray.get_actor(name)

    def _adopt_or_create(self, replica: Replica, group: Any) -> Any:
        return adopt_or_create(self._goal.spec_of(replica), replica, group, self._lead.claim)

    async def _place(self, replica: Replica) -> Any:
        """Return a placement group for a worker of several ranks that does not run. Return None for any other actor."""
        spec = self._goal.spec_of(replica)
        has_ranks = replica.kind == "worker" and spec.num_ranks > 1
        return (
            await place(spec, replica.name, self._lead.claim)
            if has_ranks and replica.name not in self._found
            else None
        )

    def _free(self, replica: Replica) -> None:
        """End all ranks of a worker, if it has several."""
        # The model of a worker that retires may be gone.
        if replica.kind == "worker" and max(len(replica.ranks), self._goal.spec_of(replica).num_ranks) > 1:
            free(self._spec, replica.name, self._lead.claim)

    def _free_all_but(self, workers: Collection[str]) -> None:
        if self._goal.has_ranks:
            free_all_but(self._spec.namespace, workers, self._lead.claim)

    def _node_id(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def _workers(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.kind == "worker"]

    def _add(self, replica: Replica) -> None:
        self._replicas.insert(len(self._workers()), replica)
        self._wanted[replica.name] = asyncio.Event()
        if self._loops is not None:
            self._keepers[replica.name] = self._loops.create_task(self._keep(replica))

    async def _stop(self, replica: Replica, grace_seconds: float) -> None:
        """Drain and end a replica, if it is up. Its `_keep` loop notices the end.

        Raise NotLeadingError, and leave the replica as it is, if this supervisor may not act.
        """
        actor = self._actors.get(replica.name)
        if not replica.is_up or actor is None:
            return
        await self._lead.confirm()
        replica.phase, replica.is_leaving = "draining", True
        self._changed.set()
        stopping = actor.stop.remote(grace_seconds, self._lead.claim.check)
        try:
            await answer(stopping, grace_seconds + GOODBYE_SECONDS)
        except (TimeoutError, ActorUnavailableError):
            while self._actors.get(replica.name) is actor:  # Until then it may live.
                if await self._end_silent(replica, actor, if_silent=False) or await self._has_died(actor):
                    return
                await asyncio.sleep(PUSH_SECONDS)
        except Exception as error:  # It may have ended meanwhile, or failed, as it was about to.
            if isinstance(getattr(error, "cause", error), NotLeadingError):
                replica.phase, replica.is_leaving = "serving", False
                raise SilentHeadError from None
            await self._end(actor)
        else:
            await self._end(actor)

    async def _has_died(self, actor: Any) -> bool:
        """Tell whether Ray knows that an actor has ended, as with its node."""
        try:
            await answer(actor.whereabouts.remote(), CALL_SECONDS)
        except ActorDiedError:
            return True
        except (TimeoutError, RayError):
            return False
        return False

    async def _stop_at_last(self, replica: Replica, grace_seconds: float) -> None:
        """Drain and end a replica as soon as this supervisor may act."""
        while True:
            await self._lead.until_confirmed()
            try:
                return await self._stop(replica, grace_seconds)
            except NotLeadingError:
                await asyncio.sleep(PUSH_SECONDS)

    async def _retire_those_beyond(self) -> None:
        beyond = self._goal.beyond(self._workers())
        async with asyncio.TaskGroup() as retirements:
            for replica in beyond:
                replica.is_retiring = True
                retirements.create_task(self._retire(replica, self._goal.desired.grace_seconds))

    async def _retire(self, replica: Replica, grace_seconds: float) -> None:
        await self._stop_at_last(replica, grace_seconds)
        if (keeper := self._keepers.pop(replica.name, None)) is not None:
            await cancel_and_wait(keeper)
        if (actor := self._actors.pop(replica.name, None)) is not None:
            await self._end(actor)
        await self._in_thread(self._free, replica)
        self._replicas.remove(replica)
        self._changed.set()

    async def _finish_scaling(self) -> None:
        async with self._one_scaling_at_a_time:
            await self._retire_those_beyond()

    async def _keep_all(self) -> None:
        async with asyncio.TaskGroup() as self._loops:
            self._loops.create_task(self._joining.keep_routers_informed())
            self._loops.create_task(self._lead.keep_confirmed())
            self._loops.create_task(self._watch_all())
            self._loops.create_task(self._finish_scaling())
            self._loops.create_task(self._store_goal())
            self._loops.create_task(self._announce())
            self._loops.create_task(self._store_reports())
            for replica in self._replicas:
                if not replica.is_leaving:
                    self._keepers[replica.name] = self._loops.create_task(self._keep(replica))

    async def _store_goal(self) -> None:
        """Keep the desired state in Ray's store as it is here.

        Commands find the cluster's handle there. A later supervisor must find no change that has failed.
        """
        while True:
            await self._store_at_last()
            await asyncio.sleep(RETRY_SECONDS)

    async def _store_at_last(self) -> None:
        """Store the desired state, unless it is, as soon as Ray's head answers."""
        while not self._goal.is_stored:
            await self._lead.until_confirmed()
            try:
                await self._goal.keep()
            except (TimeoutError, NotLeadingError, RayError):
                await asyncio.sleep(RETRY_SECONDS)

    async def _announce(self) -> None:
        await keep_announced(self._goal.router, self._replicas)

    async def _store_reports(self) -> None:
        key = key_of(self._spec.router.cluster)

        async def store(text: bytes) -> None:
            if self._lead.is_recent:
                await put(key, text, NAMESPACE)

        await keep_reported(self._report, store)

    async def _keep(self, replica: Replica) -> None:
        if replica.phase == "stopped":
            await self._until_wanted(replica)
        while True:
            replica.phase, replica.serving_since = "starting", None
            is_over = False
            try:
                await self._lead.until_confirmed()
                await self._run_once(replica)
            except Exception as error:  # Any failure is handled alike: by another start, later.
                replica.error = "" if replica.is_leaving else reason(error)
                replica.failed_at = time.monotonic() if replica.error else None
                is_over = await self._is_over(replica, error)
                if is_over:
                    logger.warning("%s", ended_line(replica.name, replica.error))
                else:
                    logger.warning("%s may live and is looked for again: %s", replica.name, replica.error)
            if replica.is_retiring:
                return
            was_taken_out = replica.was_taken_out and is_over
            replica.phase, replica.num_ready_workers, replica.num_missed = "waiting", 0, 0
            replica.refusal = ""
            self._changed.set()
            actor = self._actors.pop(replica.name, None)
            if is_over:
                # Its process may live although it cannot serve any more. The next incarnation needs its name.
                if actor is not None:
                    await self._end(actor)
                await self._in_thread(self._free, replica)
            if was_taken_out:
                await self._until_wanted(replica)
            replica.num_failures_in_a_row = self._failures_in_a_row(replica)
            replica.is_leaving = False
            await asyncio.sleep(backoff_seconds(replica.num_failures_in_a_row))

    async def _is_over(self, replica: Replica, error: Exception) -> bool:
        """Tell whether a replica that failed so has ended or can never serve again. End one that does not start."""
        match error:
            case UnreachableError() | NotLeadingError():
                return False
            case TimeoutError():
                # Without a process id it still waits for a node.
                actor = self._actors.get(replica.name)
                return bool(replica.pid) and await self._end_silent(replica, actor, if_silent=False)
            case _:
                return True

    async def _until_wanted(self, replica: Replica) -> None:
        replica.phase = "stopped"
        self._wanted[replica.name].clear()
        await self._wanted[replica.name].wait()

    def _failures_in_a_row(self, replica: Replica) -> int:
        if replica.is_leaving:
            return 0
        since = replica.serving_since
        steady = since is not None and time.monotonic() - since > STEADY_SECONDS
        return 1 if steady else replica.num_failures_in_a_row + 1

    async def _run_once(self, replica: Replica) -> None:
        """Adopt or create the replica's actor, start it, and wait for its end.

        Raise DiedError when it dies, HungError when it hangs.
        """
        replica.pid, replica.node_id, replica.ranks = 0, "", ()
        group = await self._place(replica)
        actor = await self._in_thread(self._adopt_or_create, replica, group)
        self._actors[replica.name] = actor

        async def end() -> bool:
            return await self._end_silent(replica, actor)

        async with self._health.of(replica, actor, end) as health, deaths_as_errors() as death:
            if replica.name in self._found:
                self._found.discard(replica.name)
                health.silence_seconds = STARTING_SECONDS
            whereabouts = answer(actor.whereabouts.remote(), START_SECONDS)
            replica.node_id, replica.pid = await health.unless_hung(whereabouts)
            if replica.node_id == self._node_id() and is_actor(replica.pid):
                death.watch(replica.pid)
            if replica.kind == "worker":
                if not Path(self._goal.spec_of(replica).worker.engine.model).is_absolute():
                    replica.phase = "downloading"
                await health.unless_hung(actor.fetch_model.remote())
                replica.phase = "starting"
            self._has_started(replica, await health.unless_hung(answer(actor.start.remote(), START_SECONDS)))
            await all_of(self._goal.keep_addresses(self._replicas))
            health.silence_seconds = self._spec.hung_seconds
            while True:
                try:
                    await health.unless_hung(actor.until_stopped.remote())
                except ActorUnavailableError:
                    # Only the connection is lost. If the actor has died, Ray says so at the next call.
                    await asyncio.sleep(PUSH_SECONDS)

    def _has_started(self, replica: Replica, started: StartedWorker | StartedRouter) -> None:
        replica.address, replica.pid, replica.node_id = started.address, started.pid, started.node_id
        replica.incarnation = started.incarnation if isinstance(started, StartedWorker) else ""
        replica.dtype = started.dtype if isinstance(started, StartedWorker) else ""
        replica.ranks = started.ranks if isinstance(started, StartedWorker) else ()
        replica.http_address = "" if isinstance(started, StartedWorker) else started.http_address
        replica.code = started.code
        check_code(replica, self._spec.code)
        replica.num_starts += 1
        replica.phase, replica.serving_since = "serving", time.monotonic()
        logger.info("%s", serves_line(replica.name, replica.address))
        self._changed.set()

    async def _watch_all(self) -> None:
        """Check at intervals which replicas hang and which workers drain. Save which were taken out.

        An operator drains a worker by a call to a router, so the supervisor has to ask.
        """
        while True:
            await asyncio.sleep(PUSH_SECONDS)
            if not self._lead.is_recent:
                # This host may be cut off. Then the silence of the others says nothing about them.
                self._health.ask_all_anew()
                continue
            await self._health.look_at_all()
            taken_out = taken_out_of(self._workers(), self._goal.desired.taken_out)
            if taken_out != self._goal.desired.taken_out:
                # If this fails, the next check tries again.
                await all_of(self._goal.change(taken_out=taken_out))

    def _actors_of(self, kind: Kind) -> list[Any]:
        return [
            self._actors[replica.name]
            for replica in self._replicas
            if replica.kind == kind and replica.name in self._actors
        ]


def _exit_for_restart(name: str, error: BaseException) -> NoReturn:
    """End this process after a loop has failed, because Ray restarts a dead supervisor but not an idle one."""
    log_failure(name, error)
    os._exit(1)
