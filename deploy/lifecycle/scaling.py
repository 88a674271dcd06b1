"""Scales the workers of a running cluster, for a command.

Owns the check for room, and the progress and result messages. Does not own starting and ending workers, which is the
supervisor's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor

from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.lifecycle.serving import Progress, Report
from blockyard.deploy.machine import state
from blockyard.deploy.supervision.replicas import SupervisorReport, taken_out_of
from blockyard.deploy.views.quantities import counted
from blockyard.proto.runtime.grace import DEFAULT_GRACE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """Result of a scaling."""

    workers: tuple[str, ...]
    """All workers after it."""
    added: tuple[str, ...]
    removed: tuple[str, ...]
    taken_out: tuple[str, ...] = ()
    """Workers among them that were drained and take no requests. A scaling does not bring them back."""

    def line(self) -> str:
        count = counted(len(self.workers), "worker")
        changes = [f"new: {', '.join(self.added)}"] if self.added else []
        changes += [f"gone: {', '.join(self.removed)}"] if self.removed else []
        summary = "; ".join([f"{count} now", *changes]) if changes else f"nothing to do: {count}"
        return "; ".join([summary, *map(_taken_out_text, self.taken_out)])


def scale(
    cluster: state.ClusterState,
    num_workers: int,
    *,
    model: str = "",
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    waits_for_nodes: bool = False,
    report: Report = lambda progress: None,
) -> Scaled:
    """Scale a model, or the first that is served, to `num_workers`, and save the number of all workers.

    Return once surplus workers are gone and new ones are in use. A worker that was taken out counts and stays out.
    Raise ValueError, before anything is changed, if the nodes have no room and `waits_for_nodes` is not set. Raise
    RuntimeError if a new worker does not start.
    """
    with on_ray.driver(cluster):
        before = on_ray.supervisor_report(on_ray.HELLO_SECONDS)
        model = model or before.models[0]
        names = workers_of(before, model)
        missing = num_workers - len(names)
        if missing > 0 and not waits_for_nodes:
            check_room(on_ray.room(), before, missing, before.share(model))
        on_ray.scale(
            num_workers,
            grace_seconds,
            model,
            waiting=lambda seen: report(_progress(seen, names, num_workers, model)),
        )
        after = on_ray.supervisor_report()
    scaled = scaled_of(names, after, model)
    state.update(replace(cluster, num_workers=len(workers_of(after))))
    return scaled


def scaled_of(before: tuple[str, ...], report: SupervisorReport, model: str | None = None) -> Scaled:
    after = workers_of(report, model)
    taken_out = taken_out_of((replica for replica in report.replicas if replica.name in after), frozenset())
    return Scaled(
        workers=after,
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        taken_out=tuple(sorted(taken_out)),
    )


def workers_of(report: SupervisorReport, model: str | None = None) -> tuple[str, ...]:
    """Return the names of all workers, or of one model's."""
    return tuple(
        replica.name
        for replica in report.replicas
        if replica.kind == "worker" and model in (None, replica.model)
    )


def _taken_out_text(name: str) -> str:
    return f"{name} is taken out (`blockyard restart {name}`)"


def check_room(
    free: Iterable[Mapping[str, float]], report: SupervisorReport, missing: int, share: tuple[float, float]
) -> None:
    """Raise ValueError if the nodes have no room for `missing` more workers, each with all its ranks on one node.

    `share` is the CPUs and GPUs of each.
    """
    needs = {name: amount for name, amount in zip(("CPU", "GPU"), share, strict=True) if amount}
    free = list(free)
    room = sum(_fit(node, needs) for node in free) if needs else missing
    if room >= missing:
        return
    each = " and ".join(counted(amount, name) for name, amount in needs.items())
    raise ValueError(
        f"{counted(missing, 'more worker')} of {each} each will not fit: the Ray cluster has room for {room}, "
        "and running workers hold the rest. Add a node, have an autoscaler add it (--wait-for-nodes), or start "
        f"{_smaller_share(free, report, missing, share)}"
    )


def _smaller_share(
    free: Sequence[Mapping[str, float]], report: SupervisorReport, missing: int, share: tuple[float, float]
) -> str:
    """Return how a cluster with this many more workers could fit, for an error message.

    With several nodes, or workers of unlike shares, the right number of CPUs is not known.
    """
    cpus_each, gpus_each = share
    if gpus_each:
        return "the cluster with fewer workers"
    shares = {*report.further_shares.values(), (report.cpus_per_worker, report.gpus_per_worker)}
    if len(free) != 1 or shares != {share}:
        return "workers with fewer CPUs for each (--cpus-per-worker)"
    num_running = len(workers_of(report))
    num_workers = num_running + missing
    cpus = free[0].get("CPU", 0.0) + cpus_each * num_running
    smaller = cpus // num_workers or floor(100 * cpus / num_workers) / 100
    return f"the cluster with --cpus-per-worker {smaller:g}"


def _fit(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many workers fit into a node's free resources. Ray rounds to four digits, hence the addend."""
    return min(int(node.get(name, 0.0) / amount + 1e-4) for name, amount in needs.items())


def _progress(seen: SupervisorReport, before: tuple[str, ...], num_workers: int, model: str) -> Progress:
    workers = [replica for replica in seen.replicas if replica.kind == "worker" and replica.model == model]
    if num_workers >= len(before):
        serving = sum(replica.phase == "serving" for replica in workers)
        return Progress(stage="starting workers", done=serving, total=num_workers)
    gone = max(0, len(before) - len(workers))
    return Progress(stage="draining workers", done=gone, total=len(before) - num_workers)
