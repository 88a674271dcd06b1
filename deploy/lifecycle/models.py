"""Adds and removes models of a running cluster, for a command.

Owns the checks before an addition, and the progress and result messages. Does not own starting and ending workers,
which is the supervisor's.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.lifecycle import hub, preflight
from blockyard.deploy.lifecycle.scaling import check_room, workers_of
from blockyard.deploy.lifecycle.serving import Progress, Report
from blockyard.deploy.machine import state
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.supervision.model_plans import ModelPlan
from blockyard.deploy.supervision.replicas import SupervisorReport
from blockyard.deploy.views.quantities import counted
from blockyard.router.client import BlockyardError, Client
from blockyard.router.config import ServedModel
from blockyard.worker.model.config import ModelConfig

ADAPTER_SECONDS = 65.0
"""Deadline of a call that has workers read an adapter. They take a minute at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model of a running cluster."""

    id: str
    workers: tuple[str, ...]
    serving: int
    """Workers among them that serve."""


def models_of(report: SupervisorReport) -> tuple[Model, ...]:
    """Return the models of a cluster. Requests that name none mean the first."""
    found = []
    for model in report.models:
        workers = [
            replica for replica in report.replicas if replica.kind == "worker" and replica.model == model
        ]
        names = tuple(worker.name for worker in workers)
        found.append(
            Model(id=model, workers=names, serving=sum(worker.phase == "serving" for worker in workers))
        )
    return tuple(found)


def list_models(cluster: state.ClusterState) -> tuple[Model, ...]:
    with on_ray.driver(cluster):
        return models_of(on_ray.supervisor_report(on_ray.HELLO_SECONDS))


def add(
    cluster: state.ClusterState,
    model: ServedModel,
    *,
    num_workers: int,
    settings: Mapping[str, Any],
    cpus_per_worker: float | None,
    waits_for_nodes: bool,
    report: Report = lambda progress: None,
) -> Model:
    """Serve one more model. Return once all routers send its requests to all of its workers.

    It has the cluster's settings, and these of its own (EngineConfig). Without `cpus_per_worker` each rank has as many
    CPUs as one of the cluster's first model. Before anything is changed, raise ValueError for a model that cannot be
    served with them, a name that is taken, or nodes without room, unless `waits_for_nodes` is set. Raise RuntimeError
    for a wrong setting, or if a worker does not start.
    """
    is_here = cluster.head is not None or Path(model.model).is_dir()
    if is_here:
        hub.download_all(model.model, model.tokenizer, report)
        settings = with_slots(preflight.model_config(model.model), settings)
        preflight.check_tokenizer(model)
    with on_ray.driver(cluster):
        before = on_ray.supervisor_report(on_ray.HELLO_SECONDS)
        if model.id in before.models:
            raise ValueError(f"{model.id} is served already: `blockyard scale` changes its number of workers")
        plan = on_ray.plan_model(model, num_workers, settings, cpus_per_worker)
        if is_here:
            _check(plan, cluster, report)
        if not waits_for_nodes:
            share = plan.num_cpus_per_worker, plan.num_gpus_per_worker
            check_room(on_ray.room(), before, num_workers, share)
        try:
            on_ray.add_model(plan, waiting=lambda seen: report(_starting(seen, model.id, num_workers)))
        finally:
            after = on_ray.supervisor_report()
            _save(cluster, after)
    return next(one for one in models_of(after) if one.id == model.id)


def update(
    cluster: state.ClusterState,
    model_id: str,
    path: str | None,
    *,
    num_workers: int | None,
    grace_seconds: float,
    waits_for_nodes: bool,
    report: Report = lambda progress: None,
) -> Model:
    """Serve a model from other workers, which read the files at `path`, or at its path of now.

    They start beside those of before, which end once all routers use the new ones. Without `num_workers` there are as
    many. Raise as `add` does. If a worker does not start or a router cannot read the files, the model is served as
    before.
    """
    with on_ray.driver(cluster):
        before = on_ray.supervisor_report(on_ray.HELLO_SECONDS)
        plan = on_ray.plan_update(model_id, path, num_workers)
        if cluster.head is not None or Path(plan.served.model).is_dir():
            hub.download_all(plan.served.model, plan.served.tokenizer, report)
            preflight.check_tokenizer(plan.served)
            _check(plan, cluster, report)
        if not waits_for_nodes:
            share = plan.num_cpus_per_worker, plan.num_gpus_per_worker
            check_room(on_ray.room(), before, plan.num_workers, share)
        try:
            on_ray.update_model(plan, grace_seconds, waiting=lambda seen: report(_updating(seen, plan)))
        finally:
            after = on_ray.supervisor_report()
            _save(cluster, after)
    return next(one for one in models_of(after) if one.id == model_id)


def _check(plan: ModelPlan, cluster: state.ClusterState, report: Report) -> None:
    """Raise ValueError if workers of this plan cannot serve its model. The model's files must be on this machine."""
    address = None if cluster.head is not None else cluster.ray_address
    draft = plan.engine.draft_model
    if draft is not None and address is None:
        preflight.of_draft(lambda: hub.download(draft, report))
    options = UpOptions(engine=plan.engine, address=address)
    preflight.check_one_model(options, has_gpu=plan.num_gpus_per_worker > 0, is_downloaded=True)


def with_slots(config: ModelConfig, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a model, without adapter slots if it serves no adapters.

    Raise ValueError if it serves none and `settings` ask for slots.
    """
    from blockyard.worker.lora.peft import check_has_slots  # it loads torch

    try:
        check_has_slots(config)
    except ValueError:
        if settings.get("max_loras"):
            raise
        return {**settings, "max_loras": 0}
    return settings


def remove(
    cluster: state.ClusterState,
    model_id: str,
    *,
    grace_seconds: float,
    report: Report = lambda progress: None,
) -> None:
    """Stop serving a model. Return once its running requests have ended and its workers are gone.

    Raise RuntimeError for an unknown model, and for the last one.
    """
    with on_ray.driver(cluster):
        on_ray.remove_model(model_id, grace_seconds, waiting=lambda seen: report(_ending(seen, model_id)))
        _save(cluster, on_ray.supervisor_report())


def add_adapters(cluster: state.ClusterState, options: UpOptions) -> Iterator[str]:
    """Add the adapters that `up` was given. Yield a warning for each that could not be added.

    Where routers ask for tokens or TLS, `up` has none, and the operator has to add them.
    """
    security = options.security
    for adapter in options.additions.adapters:
        why = "routers ask for a token or TLS"
        if security.auth_file is None and security.tls is None:
            try:
                with Client(list(cluster.routers), timeout_seconds=ADAPTER_SECONDS) as client:
                    client.add_adapter(
                        adapter.name, adapter.path, tenant=adapter.tenant, model=adapter.model or None
                    )
                continue
            except BlockyardError as error:
                why = str(error)
        options_of = {"--model": adapter.model, "--tenant": adapter.tenant}
        more = [word for pair in options_of.items() if pair[1] for word in pair]
        command = shlex.join(["blockyard", "lora", "add", adapter.name, adapter.path, *more])
        yield f"adapter {adapter.name} is not added ({why}): `{command}{state.which(cluster.cluster)}`"


def added_line(model: Model) -> str:
    return f"{model.id} is served on {counted(len(model.workers), 'worker')}: {', '.join(model.workers)}"


def _save(cluster: state.ClusterState, report: SupervisorReport) -> None:
    num_workers = len(workers_of(report))
    state.update(replace(cluster, model=", ".join(report.models), num_workers=num_workers))


def _starting(seen: SupervisorReport, model_id: str, num_workers: int) -> Progress:
    serving = sum(model.serving for model in models_of(seen) if model.id == model_id)
    return Progress(stage=f"starting workers of {model_id}", done=serving, total=num_workers)


def _updating(seen: SupervisorReport, plan: ModelPlan) -> Progress:
    new = [replica for replica in seen.replicas if replica.name.startswith(plan.workers_prefix)]
    serving = sum(replica.phase == "serving" for replica in new)
    return Progress(stage=f"starting other workers of {plan.id}", done=serving, total=plan.num_workers)


def _ending(seen: SupervisorReport, model_id: str) -> Progress:
    left = sum(replica.model == model_id for replica in seen.replicas)
    return Progress(stage=f"draining {counted(left, 'worker')} of {model_id}")
