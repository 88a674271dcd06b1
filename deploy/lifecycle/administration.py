"""Administration: rolling restarts, and the messages of the drain and flush commands.

Owns the order of a rolling restart. The supervisor restarts each worker or router. Drains, resumes and flushes go
through a router's AdminService (router/client).
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.lifecycle.serving import Progress, Report
from blockyard.deploy.machine.state import ClusterState
from blockyard.deploy.views.views import command_name
from blockyard.proto.runtime.grace import DEFAULT_GRACE_SECONDS
from blockyard.proto.v1 import cluster_pb2
from blockyard.proto.v1.admin_pb2 import FlushCacheResponse, PullPrefixResponse

if TYPE_CHECKING:
    from blockyard.deploy.supervision.replicas import Replica


def restart(
    cluster: ClusterState,
    names: Sequence[str] = (),
    *,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    takes_new_files: bool = False,
    report: Report = lambda progress: None,
) -> list[str]:
    """Restart workers and routers one by one, workers first, and return their names. Without `names`, restart all.

    With `takes_new_files` all workers restart at once, and then the routers one by one. Raise ValueError for an unknown
    name, before anything is stopped. Raise RuntimeError if one does not come back, or if a model's files have changed
    and `takes_new_files` is not set. The ones after it are then not restarted.
    """
    with on_ray.driver(cluster):
        replicas = on_ray.supervisor_report(on_ray.HELLO_SECONDS).replicas
        order = restart_order([replica.name for replica in replicas], names)
        at_once = whole_models(replicas, order) if takes_new_files else []
        if at_once:
            started = Progress(stage="restarting workers", done=0, total=len(order))
            on_ray.restart_at_once(at_once, grace_seconds, waiting=lambda seen: report(started))
        for number, name in enumerate(order):
            if name not in at_once:
                _restart_one(name, number, len(order), grace_seconds, report)
    return order


def whole_models(replicas: Sequence["Replica"], wanted: Sequence[str]) -> list[str]:
    """Return the workers among the wanted names.

    Raise ValueError if they are a part only of a model's workers: routers would refuse them while the others serve.
    """
    workers = [replica for replica in replicas if replica.kind == "worker"]
    models = {worker.model for worker in workers if worker.name in wanted}
    names = [worker.name for worker in workers if worker.model in models]
    if left := [name for name in names if name not in wanted]:
        raise ValueError(
            f"with --new-files all workers of a model restart at once: name {', '.join(left)} too"
        )
    return names


def restart_order(known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the wanted names in the order of `known`, or all without any. Raise ValueError for an unknown name."""
    for name in wanted:
        if name not in known:
            raise ValueError(f"no worker or router is called {name!r}, only {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]


def _restart_one(name: str, number: int, total: int, grace_seconds: float, report: Report) -> None:
    def tell(phase: str) -> None:
        report(Progress(stage=f"{name}: {phase}", done=number, total=total))

    tell("draining")
    on_ray.restart(
        name,
        grace_seconds,
        waiting=lambda seen: tell(_STAGES[next(p.phase for p in seen.replicas if p.name == name)]),
    )


_STAGES = {
    "draining": "draining",
    "waiting": "starting again",
    "starting": "starting again",
    "downloading": "downloading the model",
    "stopped": "starting again",
    "serving": "joining routers and workers",
}


def ready_workers(workers: Iterable[cluster_pb2.Worker]) -> list[str]:
    ready = (worker for worker in workers if worker.state == cluster_pb2.WORKER_STATE_READY)
    return [worker.worker_id for worker in ready]


def last_line(worker: str, which: str) -> str:
    return (
        f"{worker} is the only worker that takes requests: new requests wait now, and fail as NO_WORKERS if that "
        f"lasts; `{command_name()} resume {worker}{which}` undoes the drain"
    )


def drained_line(worker: str, moved: int) -> str:
    elsewhere = {0: "", 1: "; 1 request moved to another worker"}.get(
        moved, f"; {moved} requests moved to other workers"
    )
    return f"{worker} is drained, nothing runs there{elsewhere}"


def flushed_line(flushed: FlushCacheResponse) -> str:
    host = f" and {flushed.flushed_host_blocks:,} in host memory" if flushed.flushed_host_blocks else ""
    return f"dropped {flushed.flushed_blocks:,} cached blocks{host}"


def pulled_line(worker: str, pulled: PullPrefixResponse) -> str:
    has = f"it has {pulled.blocks_before + pulled.num_blocks:,} of the prompt's {pulled.prompt_blocks:,}"
    if not pulled.num_blocks:
        return f"{worker} fetched nothing: {has}"
    size = f"{pulled.num_bytes / 2**20:,.1f} MiB in {pulled.elapsed_ms:,.0f} ms"
    return f"{worker} fetched {pulled.num_blocks:,} blocks from {pulled.source_id}, {size}: {has}"
