"""`blockyard up --dry-run`: shows what `up` would start and what would prevent it. Starts nothing.

Owns the plan and its view. The checks are in preflight.py and doctor.py, the numbers of workers in shape.py. With
--address it asks the Ray cluster for its resources. Without, it inspects this machine.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from blockyard.deploy.lifecycle import doctor, preflight
from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.lifecycle.cluster import refuse_if_up
from blockyard.deploy.lifecycle.serving import split_over_nodes
from blockyard.deploy.lifecycle.shape import Shape, rooms, shape_on, whole_workers
from blockyard.deploy.machine.check_results import Finding, exit_code
from blockyard.deploy.machine.state import ClusterState
from blockyard.deploy.ray import nodes
from blockyard.deploy.settings import effective, redis_given
from blockyard.deploy.settings.setting import masked
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.views import views
from blockyard.deploy.views.quantities import counted
from rich.console import Group, RenderableType
from rich.text import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of the Ray cluster that `up` would join or start."""

    cpus: float
    workers: int
    """Workers that fit there with all their ranks, if nodes are filled in order. Ray may spread them over several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The cluster that `up` would start."""

    cluster: str
    model: str
    shape: Shape | None
    """None if the workers do not fit. Then the findings say why."""
    nodes: tuple[Node, ...]
    num_gpus: float
    dtype: str | None
    """Data type that workers would compute in, and why. None if their node decides."""
    block_size: int
    blocks_of_worker: int | None
    """Blocks of each worker's pool. None if its node's GPU memory or CPU instructions decide."""
    routers: tuple[str, ...]
    redis: str
    findings: tuple[Finding, ...]

    @property
    def would_work(self) -> bool:
        return exit_code(list(self.findings)) == 0

    def as_dict(self) -> dict[str, Any]:
        blocks = self.blocks_of_worker
        tokens = None if blocks is None else blocks * self.block_size
        return asdict(self) | {"tokens_of_worker": tokens, "would_work": self.would_work}


def examine(options: UpOptions) -> Plan:
    """Make the plan. Problems of the planned cluster are findings, not exceptions."""
    options, moved_ports = preflight.ports_moved(options)
    findings = [*_looks(options), *_refusals(options)]
    for warning in (*moved_ports, *filter(None, (options.exposure,))):
        findings.append(Finding(verdict="warn", subject="router port", detail=warning))
    hardware, other_hosts = _hardware(options, findings)
    shape, num_gpus = _shape(options, hardware, findings), hardware.num_gpus
    nodes = tuple(_filled(hardware, shape))
    if shape is not None and (split := shape.all_workers - sum(node.workers for node in nodes)):
        findings.append(
            Finding(verdict="warn", subject="workers", detail=split_over_nodes(counted(split, "worker")))
        )
    if shape is not None and (crowding := preflight.crowding(options)) is not None:
        findings.append(Finding(verdict="warn", subject="workers", detail=crowding))
    has_gpu = _would_have_gpu(options, num_gpus)
    has_private_redis = options.given_redis_url is None
    try:
        preflight.check_reachable(other_hosts, has_private_redis=has_private_redis)
    except RuntimeError as error:
        findings.append(_failure("redis", str(error)))
    return Plan(
        cluster=options.cluster,
        model=", ".join(model.id for model in options.served_models),
        shape=shape,
        nodes=nodes,
        num_gpus=num_gpus,
        dtype=_dtype(options, has_gpu=has_gpu),
        block_size=options.engine.block_size,
        blocks_of_worker=_blocks(options, has_gpu=has_gpu),
        routers=tuple(_addresses(options)),
        redis=_redis(options, has_private_redis),
        findings=tuple(findings),
    )


def _looks(options: UpOptions) -> Iterator[Finding]:
    """Yield doctor's findings, but with `up`'s check of a given Redis: `up` starts even if that does not answer."""
    for finding in doctor.examine(None, options.redis_url):
        if finding.subject != "redis":
            yield finding
    try:
        for warning in redis_given.check(options):
            yield Finding(verdict="warn", subject="redis", detail=warning)
    except ValueError as error:
        yield _failure("redis", str(error))


def plan_view(plan: Plan, settings: Iterable[effective.Effective]) -> RenderableType:
    changed = effective.effective_table(settings, changed_only=True)
    return Group(
        Text("\n".join(_lines(plan))),
        Text("\nsettings that are not defaults"),
        changed if changed.row_count else Text("none"),
        Text("\nchecks"),
        *(views.finding_line(finding) for finding in plan.findings),
        Text("\nit would start" if plan.would_work else "\nit would not start", "bold"),
    )


def _lines(plan: Plan) -> Iterator[str]:
    yield f"cluster {plan.cluster} would serve {plan.model}; nothing has been started"
    if plan.shape is not None:
        gpu = f", {counted(plan.shape.num_gpus, 'GPU')}" if plan.shape.num_gpus else ""
        ranks = f", {plan.shape.num_ranks} ranks" if plan.shape.num_ranks > 1 else ""
        count = f"{plan.shape.num_workers}{' of each model' if plan.shape.num_models > 1 else ''}"
        yield f"workers    {count}, each with {counted(plan.shape.num_cpus, 'CPU')}{gpu}{ranks}"
    else:
        yield "workers    none: see the checks"
    for number, node in enumerate(plan.nodes):
        workers = f", {counted(node.workers, 'worker')}" if plan.shape is not None else ""
        yield f"node {number}     {counted(node.cpus, 'CPU')}{workers}"
    dtype = plan.dtype or "what the worker's node decides; the worker logs it"
    yield f"data type  {dtype}"
    if plan.blocks_of_worker is None:
        decides = "the worker's node decides" if plan.dtype is None else "its GPU's memory leaves"
        yield f"pool       what {decides}; the worker logs it"
    else:
        tokens = plan.blocks_of_worker * plan.block_size
        yield f"pool       {plan.blocks_of_worker:,} blocks of {plan.block_size}, {tokens:,} tokens on each worker"
    yield from (f"router     {address}" for address in plan.routers)
    yield f"redis      {plan.redis}"


def _refusals(options: UpOptions) -> Iterator[Finding]:
    try:
        refuse_if_up(options.cluster)
    except ValueError as error:
        yield _failure("cluster", str(error))
    for subject, detail in preflight.problems(options):
        yield _failure(subject, detail)


def _hardware(options: UpOptions, findings: list[Finding]) -> tuple[on_ray.Hardware, int]:
    """Return the CPUs and GPUs of the nodes, and the number of other machines.

    Add a finding if a given Ray does not answer, or its nodes have other code or end too early.
    """
    if options.address is None:
        node_cpus, num_gpus = preflight.local_hardware(options)
        return on_ray.Hardware(node_cpus=node_cpus, num_gpus=num_gpus, node_gpus=(num_gpus,)), 0
    asked = ClusterState(cluster=options.cluster, model="", secret="", ray_address=options.address)
    try:
        with on_ray.driver(asked):
            findings.extend(_of_nodes(options))
            return on_ray.hardware(), preflight.other_hosts()
    except RuntimeError as error:
        findings.append(_failure("ray", str(error)))
        return on_ray.Hardware(node_cpus=(), num_gpus=0.0, node_gpus=()), 0


def _of_nodes(options: UpOptions) -> Iterator[Finding]:
    asked = nodes.ask_nodes()
    if warning := nodes.short_reconnect(asked):
        yield Finding(verdict="warn", subject="ray", detail=warning)
    try:
        if not options.ships_code:
            nodes.check_code(asked)
    except ValueError as error:
        yield _failure("code", str(error))


def _shape(options: UpOptions, hardware: on_ray.Hardware, findings: list[Finding]) -> Shape | None:
    """Return the shape, or None if it does not fit.

    On a joined cluster that adds a finding. Otherwise preflight's check of workers has already made it.
    """
    try:
        return shape_on(options, hardware) if hardware.node_cpus else None
    except RuntimeError as error:
        if options.address is not None:
            findings.append(_failure("workers", str(error)))
        return None


def _filled(hardware: on_ray.Hardware, shape: Shape | None) -> list[Node]:
    if shape is None:
        return [Node(cpus=cpus, workers=0) for cpus in hardware.node_cpus]
    workers = whole_workers(rooms(hardware, shape), shape)
    return [Node(cpus=cpus, workers=here) for cpus, here in zip(hardware.node_cpus, workers, strict=True)]


def _would_have_gpu(options: UpOptions, num_gpus: float) -> bool:
    """Tell whether workers would use GPUs. With `--device cuda` they would. A missing GPU is a finding."""
    return options.engine.device == "cuda" or (options.engine.device != "cpu" and num_gpus > 0)


def _blocks(options: UpOptions, *, has_gpu: bool) -> int | None:
    try:
        pool = preflight.pool_of(options, preflight.model_config(options.engine.model), has_gpu=has_gpu)
    except (ValueError, OSError):
        return None  # a finding says so
    return None if pool is None else pool.num_blocks


def _dtype(options: UpOptions, *, has_gpu: bool) -> str | None:
    try:
        chosen = preflight.dtype_here(options, preflight.model_config(options.engine.model), has_gpu=has_gpu)
    except (ValueError, OSError):
        return None  # a finding says so
    return None if chosen is None else str(chosen)


def _addresses(options: UpOptions) -> Iterator[str]:
    host = options.host
    is_shared = not options.separate_ports
    of = f", shared by {options.num_routers} routers" if is_shared and options.num_routers > 1 else ""
    for number in range(1 if is_shared else options.num_routers):
        http = "" if options.http_port is None else f", HTTP on {_port(options.http_port, number)}"
        yield f"{host}, {_port(options.router_port, number)}{http}{of}"


def _port(first: int, number: int) -> str:
    return f"port {first + number}" if first else "a free port"


def _redis(options: UpOptions, has_private_redis: bool) -> str:
    if has_private_redis:
        return "a private one, on this machine's loopback"
    return masked(options.given_redis_url) or ""


def _failure(subject: str, detail: str) -> Finding:
    return Finding(verdict="fail", subject=subject, detail=detail)
