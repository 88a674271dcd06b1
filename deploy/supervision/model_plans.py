"""Model plans: the models that a cluster serves, with the workers that each should have.

Pure. Owns the names by which workers of several models are told apart. The first model is the one that the cluster
began with. Its workers are in the cluster's spec, and those of each further model in a plan. Does not own starting or
stopping anything (supervisor.py).
"""

import re
from dataclasses import dataclass, replace

from blockyard.router.config import ServedModel, check_models
from blockyard.worker.config import EngineConfig

MAX_PREFIX_LENGTH = 40
_NO_NAME = re.compile(r"[^a-z0-9.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """One further model, and its workers."""

    served: ServedModel
    engine: EngineConfig
    num_workers: int
    num_cpus_per_worker: float
    num_gpus_per_worker: float
    generation: int = 1
    """Number of this set of workers of the model. Each update begins another one, whose workers have other names."""

    @property
    def id(self) -> str:
        return self.served.id

    @property
    def workers_prefix(self) -> str:
        """Return how the names of its workers begin."""
        short = _NO_NAME.sub("-", self.id.lower()).strip("-.")[:MAX_PREFIX_LENGTH]
        generation = f"-{self.generation}" if self.generation > 1 else ""
        return f"{short or 'model'}{generation}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlans:
    """All models of a cluster. Raises ValueError if two have a name, an index or names of workers in common."""

    first: ServedModel | None
    """None: it was removed."""
    further: tuple[ModelPlan, ...]

    def __post_init__(self) -> None:
        check_models(self.served)
        prefixes: dict[str, str] = {}
        for plan in self.further:
            if (other := prefixes.setdefault(plan.workers_prefix, plan.id)) != plan.id:
                raise ValueError(
                    f"workers of {plan.id!r} and {other!r} would have the same names: give one another name (--name)"
                )

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """Return the models as routers serve them. Requests that name no model mean the first of them."""
        first = () if self.first is None else (self.first,)
        return (*first, *(plan.served for plan in self.further))

    def plan(self, model: str) -> ModelPlan | None:
        return next((plan for plan in self.further if plan.id == model), None)

    def is_first(self, model: str) -> bool:
        return self.first is not None and self.first.id == model

    def known(self, model: str) -> ServedModel:
        """Return the model of this id. Raises ValueError if there is none."""
        found = next((served for served in self.served if served.id == model), None)
        if found is None:
            raise ValueError(
                f"no model is called {model!r}, only {', '.join(served.id for served in self.served)}"
            )
        return found

    def adding(self, plan: ModelPlan) -> "ModelPlans":
        return replace(self, further=(*self.further, plan))

    def updating(self, plan: ModelPlan) -> "ModelPlans":
        """Return the plans with this one in place of that of its model, which keeps its place in the order."""
        if self.is_first(plan.id):
            return replace(self, first=None, further=(plan, *self.further))
        return replace(self, further=tuple(plan if each.id == plan.id else each for each in self.further))

    def without(self, model: str) -> "ModelPlans":
        """Return the plans without this model. Raises ValueError for an unknown one, and for the last one."""
        self.known(model)
        if len(self.served) == 1:
            raise ValueError(f"{model} is the only model: add another one first, or end the cluster (`down`)")
        if self.is_first(model):
            return replace(self, first=None)
        return replace(self, further=tuple(plan for plan in self.further if plan.id != model))

    def scaled(self, model: str, num_workers: int) -> "ModelPlans":
        plans = (
            replace(plan, num_workers=num_workers) if plan.id == model else plan for plan in self.further
        )
        return replace(self, further=tuple(plans))
