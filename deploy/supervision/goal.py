"""Goal: the workers and routers that should run in one cluster now, as operators have changed it since `up`.

Owns what of that outlives the supervisor, by its store (desired_state.py). Does not own starting or stopping anything
(supervisor.py).
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from blockyard.deploy.supervision.desired_state import DesiredState, DesiredStateStore
from blockyard.deploy.supervision.model_plans import ModelPlan, ModelPlans
from blockyard.deploy.supervision.replicas import ClusterSpec, Replica, model_of, replicas_of, workers_of
from blockyard.router.config import RouterConfig, ServedModel

UPDATE = " (update)"
"""Ending of the model of workers that start for an update. Routers do not serve such a model."""
REPLACED = " (replaced)"
"""Ending of the model of workers that an update has replaced, and that end."""


class Goal:
    """Goal of one cluster. A change holds once it is stored."""

    def __init__(
        self, spec: ClusterSpec, store: DesiredStateStore, confirm: Callable[[], Awaitable[None]]
    ) -> None:
        """`confirm` raises an error if this supervisor does not lead, or cannot know it."""
        self._spec = spec
        self._store = store
        self._confirm = confirm
        self.is_stored = False
        """Whether the store has the desired state as it is here."""
        self._one_at_a_time = asyncio.Lock()
        self.update: ModelPlan | None = None
        """An update whose workers start beside those of before. It is not stored: a restarted supervisor ends them."""
        self.desired = store.load() or DesiredState(
            num_workers=spec.num_workers, further_models=spec.further_models, handle=spec.handle
        )

    @property
    def models(self) -> ModelPlans:
        first = self._spec.first_model if self.desired.serves_first else None
        return ModelPlans(first=first, further=self.desired.further_models)

    def replicas(self) -> list[Replica]:
        """Return new replicas of all workers and routers that should run."""
        num_workers = self.desired.num_workers if self.desired.serves_first else 0
        updating = [] if self.update is None else workers_of(self.update, f"{self.update.id}{UPDATE}")
        return [*updating, *replicas_of(self._spec, num_workers, self.desired.further_models)]

    def model_of(self, worker: str) -> str:
        """Return the id of the model of a worker with this name."""
        return model_of(worker, self.desired.further_models, first=self._spec.first_model.id)

    def spec_of(self, replica: Replica) -> ClusterSpec:
        """Return the spec by which a replica runs: that of a worker's model, and a router's with the models of now."""
        if replica.kind == "router":
            return replace(self._spec, router=self.router())
        if self.update is not None and replica.model == f"{self.update.id}{UPDATE}":
            return self._spec.of_model(self.update)
        return self._spec.of_model(self.models.plan(replica.model))

    def router(self) -> RouterConfig:
        """Return the template of routers, with the models of now."""
        return self._spec.router.with_models(self.models.served)

    @property
    def has_ranks(self) -> bool:
        """Return True if workers of a model have several ranks."""
        plans = (*self.models.further, *([] if self.update is None else [self.update]))
        specs = (self._spec, *(self._spec.of_model(plan) for plan in plans))
        return any(spec.num_ranks > 1 for spec in specs)

    def beyond(self, workers: Iterable[Replica]) -> list[Replica]:
        """Return the workers that should not run: of a higher number than their model has, of none, or replaced."""
        wanted = {replica.name for replica in self.replicas()}
        return [worker for worker in workers if worker.name not in wanted]

    async def change(self, **changes: Any) -> None:
        """Store a change of fields of the desired state.

        Raise TimeoutError if the store does not answer, NotLeadingError if another supervisor may lead. It may have
        taken over just before the change was stored, and then does not know of it.
        """
        async with self._one_at_a_time:
            desired = replace(self.desired, **changes)
            await self._confirm()
            # A store that fails may still have taken it. `keep` then stores what counts here.
            self.is_stored = False
            await self._store.save(desired)
            await self._confirm()
            self.desired, self.is_stored = desired, True

    async def keep(self) -> None:
        """Store the desired state as it is, so that a command finds the cluster's handle."""
        await self.change()

    async def keep_addresses(self, replicas: Iterable[Replica]) -> None:
        """Store the routers' addresses. After a restart of all of Ray they are known nowhere else."""
        routers = (replica for replica in replicas if replica.kind == "router" and replica.address)
        addresses = tuple((replica.name, replica.address, replica.http_address) for replica in routers)
        if addresses != self.desired.addresses:
            await self.change(addresses=addresses)

    async def scale(self, model: str, num_workers: int, grace_seconds: float) -> str:
        """Change the number of workers of a model ("": the first that is served). Return its id.

        Raise ValueError for less than one worker, or an unknown model.
        """
        if num_workers < 1:
            raise ValueError(f"a cluster needs at least one worker, not {num_workers}")
        models = self.models
        model = models.known(model or models.served[0].id).id
        if models.is_first(model):
            await self.change(num_workers=num_workers, grace_seconds=grace_seconds)
        else:
            scaled = models.scaled(model, num_workers)
            await self.change(further_models=scaled.further, grace_seconds=grace_seconds)
        return model

    def plan(
        self,
        model: ServedModel,
        num_workers: int,
        settings: Mapping[str, Any] | None = None,
        cpus_per_worker: float | None = None,
    ) -> ModelPlan:
        """Return the plan of a model that may be added. It has the settings of `up`, but without its draft model, and
        these of its own (EngineConfig).

        Each rank has as many CPUs and GPUs as those of `up`, unless the CPUs of a worker are given. Raise ValueError
        for a name that another model has, and for a wrong setting.
        """
        own = {"draft_model": None, **(settings or {})}
        engine = replace(self._spec.worker.engine, model=model.model, tokenizer=model.tokenizer, **own)
        factor = engine.tensor_parallel_size / self._spec.num_ranks
        plan = ModelPlan(
            served=replace(model, addition=secrets.token_hex(8)),
            engine=engine,
            num_workers=num_workers,
            num_cpus_per_worker=cpus_per_worker or factor * self._spec.num_cpus_per_worker,
            num_gpus_per_worker=factor * self._spec.num_gpus_per_worker,
        )
        self.models.adding(plan)
        return plan

    async def add(self, plan: ModelPlan) -> None:
        """Add a model. Raise ValueError for a name that another model has."""
        await self.change(further_models=self.models.adding(plan).further)

    def plan_update(self, model: str, path: str | None, num_workers: int | None) -> ModelPlan:
        """Return a plan of other workers for a model, which read the files at `path`, or at its path of now.

        Raise ValueError for an unknown model, and for one with workers for prefill alone.
        """
        models, spec = self.models, self._spec
        served, before = models.known(model), models.plan(model)
        if before is None:
            if spec.num_prefill_workers:
                raise ValueError(
                    f"{model} has workers for prefill, which an update would not have: `down` and `up`"
                )
            before = ModelPlan(
                served=served,
                engine=spec.worker.engine,
                num_workers=self.desired.num_workers,
                num_cpus_per_worker=spec.num_cpus_per_worker,
                num_gpus_per_worker=spec.num_gpus_per_worker,
            )
        path, generation = path or served.model, before.generation + 1
        index = f"{served.id}@{generation}"
        plan = replace(
            before,
            served=replace(served, model=path, index=index, addition=secrets.token_hex(8)),
            engine=replace(before.engine, model=path),
            num_workers=num_workers or before.num_workers,
            generation=generation,
        )
        models.updating(plan)
        return plan

    async def finish_update(self, grace_seconds: float) -> None:
        """Have the workers of the update serve its model, in place of those of before."""
        assert self.update is not None
        models, self.update = self.models.updating(self.update), None
        await self.change(
            serves_first=models.first is not None, further_models=models.further, grace_seconds=grace_seconds
        )

    async def remove(self, model: str, grace_seconds: float) -> ServedModel:
        """Remove a model and return it. Raise ValueError for an unknown one, and for the last one."""
        models = self.models
        left = models.without(model)
        await self.change(
            serves_first=left.first is not None, further_models=left.further, grace_seconds=grace_seconds
        )
        return models.known(model)
