"""Brings a cluster up and takes it down: Redis, Ray, the supervisor, and the state file that remembers them.

Owns the order of things and the undoing of a start that failed or was interrupted. Does not own how each part
runs.

    up:   state file -> private Redis -> Ray head -> supervisor -> workers + routers serve
    down: routers drain, workers say goodbye -> supervisor -> Ray's session -> Redis -> files -> state file
"""

import contextlib
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.deploy import on_ray, ray_head, state
from blockyard.deploy.interruption import undisturbed
from blockyard.deploy.processes import end_session, identify, is_alive, owns_session, session_members
from blockyard.deploy.redis_server import RedisProcess, configured_redis_url, start_private_redis
from blockyard.deploy.state import ClusterState, HeadState, RedisState
from blockyard.router.client import Client
from blockyard.router.config import (
    DEFAULT_MAX_BEAM_WIDTH,
    DEFAULT_MAX_OUTPUTS,
    RouterConfig,
)
from blockyard.router.placement_config import PolicyName
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.model.config import load_config

if TYPE_CHECKING:
    from blockyard.deploy.supervisor import ClusterSpec

SERVE_SECONDS = 600.0
"""Loading a large model from a slow disk takes minutes."""
CONNECT_SECONDS = 30.0
MAX_CPUS_BESIDE_GPU = 4.0
"""A worker with a GPU plans and samples on few threads."""
DRAIN_SECONDS = 5.0
MAX_TEMP_LENGTH = 25
"""A unix socket's path has 107 characters at most; Ray's part and ours take about 80."""
_POLL_SECONDS = 0.1


class ClusterStartError(RuntimeError):
    """The cluster did not come to serve; what had been started was stopped again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What to bring up."""

    engine: EngineConfig
    model_name: str | None = None
    """What clients call the model; None: its folder's or hub name's last part."""
    cluster: str = "default"
    num_workers: int | None = None
    """None: one for each GPU of the Ray cluster, or one on a machine without any."""
    num_routers: int = 1
    policy: PolicyName = "prefix"
    max_outputs: int = DEFAULT_MAX_OUTPUTS
    """Of one request (`n`)."""
    max_beam_width: int = DEFAULT_MAX_BEAM_WIDTH
    cpus_per_worker: float | None = None
    """None: the cluster's CPUs in equal shares."""
    router_port: int = 0
    """Of the first router, the others follow; 0 takes free ones."""
    address: str | None = None
    """An existing Ray cluster to join; None starts a local one."""
    redis_url: str | None = None

    def __post_init__(self) -> None:
        state.checked_name(self.cluster)
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"a cluster needs at least one worker, not {self.num_workers}")
        if self.num_routers < 1:
            raise ValueError(f"a cluster needs at least one router, not {self.num_routers}")
        for name in ("max_outputs", "max_beam_width"):
            # The routers refuse it too, but only once Ray runs.
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at a start under way."""

    stage: str
    done: int = 0
    total: int | None = None
    """None: it cannot be counted."""


Report = Callable[[Progress], None]


def up(options: UpOptions, report: Report = lambda progress: None) -> ClusterState:
    """Returns once every worker and router serves. On any failure, Ctrl-C included, undoes what it has done.

    Raises ClusterStartError, RedisStartError, RayStartError, or ValueError for a cluster that is up
    already or a model that the engine cannot run."""
    _refuse_if_up(options.cluster)
    if Path(options.engine.model).is_dir():
        load_config(Path(options.engine.model))
    cluster = ClusterState(
        cluster=options.cluster,
        model=options.model_name or Path(options.engine.model).name,
        secret=secrets.token_hex(32),
        directory=str(_make_directory()),
        starter=identify(os.getpid()),
    )
    state.save(cluster)
    try:
        cluster = _start_redis(cluster, options, report)
        cluster = _start_ray(cluster, options, report)
        return _start_serving(cluster, options, report)
    except BaseException:
        with undisturbed():
            report(Progress(stage="stopping what was started"))
            down(state.load(options.cluster), drain_seconds=0.0)
        raise


def down(
    cluster: ClusterState,
    *,
    drain_seconds: float = DRAIN_SECONDS,
    forget: bool = False,
    report: Report = lambda progress: None,
) -> None:
    """Stops what `up` started, by pid, and removes its files. On a cluster that we joined only our actors
    end, and it must answer."""
    report(Progress(stage="saying goodbye to routers and workers"))
    if not forget:
        _say_goodbye(cluster, drain_seconds)
    report(Progress(stage="stopping processes"))
    if cluster.head is not None:
        end_session(cluster.head.session, cluster.head.processes)
    if cluster.redis is not None and identify(cluster.redis.process.pid) == cluster.redis.process:
        _redis_process(cluster, cluster.redis).stop()
    if cluster.directory is not None:
        shutil.rmtree(cluster.directory, ignore_errors=True)
    state.forget(cluster.cluster)


def leftovers(cluster: ClusterState) -> list[str]:
    """What of a cluster that is down is still there: nothing, or `down` has failed."""
    left = [f"process {process.pid}" for process in cluster.recorded_processes() if is_alive(process)]
    if cluster.head is not None:
        left += [f"process {process.pid}" for process in session_members(cluster.head.session)]
    paths = (cluster.directory and Path(cluster.directory), state.state_path(cluster.cluster))
    return sorted({*left, *(str(path) for path in paths if path and path.exists())})


def cpus_per_worker(node_cpus: Sequence[float], num_workers: int) -> float:
    """As many whole CPUs as let all workers fit on the nodes, for Ray sets a worker's threads from them;
    where there are more workers than CPUs, a part of one."""
    for share in range(int(max(node_cpus)), 0, -1):
        if sum(int(cpus // share) for cpus in node_cpus) >= num_workers:
            return float(share)
    return min(node_cpus) / math.ceil(num_workers / len(node_cpus))


def _say_goodbye(cluster: ClusterState, drain_seconds: float) -> None:
    if cluster.ray_address is None:
        return
    if cluster.head is None:
        with on_ray.driver(cluster):
            on_ray.shut_down(drain_seconds)
    elif owns_session(cluster.head.session, cluster.head.processes):
        # A Ray that no longer answers must not keep us from ending its processes.
        with contextlib.suppress(Exception), on_ray.driver(cluster):
            on_ray.shut_down(drain_seconds)


def _refuse_if_up(cluster: str) -> None:
    """A state file whose processes have all gone is what a crash left: it is tidied away."""
    try:
        existing = state.load(cluster)
    except state.NoSuchClusterError:
        return
    if existing.anything_alive():
        raise ValueError(
            f"cluster {cluster!r} is up already: use it, or `blockyard down --cluster {cluster}`"
        )
    if existing.directory is not None:
        shutil.rmtree(existing.directory, ignore_errors=True)
    state.forget(cluster)


def _make_directory() -> Path:
    """Short enough for the sockets that Ray makes in it, whatever TMPDIR says."""
    parent = tempfile.gettempdir()
    directory = Path(tempfile.mkdtemp(prefix="by-", dir=parent if len(parent) <= MAX_TEMP_LENGTH else "/tmp"))
    return directory.resolve()


def _start_redis(cluster: ClusterState, options: UpOptions, report: Report) -> ClusterState:
    url = options.redis_url or configured_redis_url()
    if url is not None:
        return _saved(replace(cluster, redis_url=url))
    report(Progress(stage="starting Redis"))
    assert cluster.directory is not None
    server = start_private_redis(Path(cluster.directory) / "redis", password=secrets.token_hex(16))
    process = identify(server.pid)
    assert process is not None
    redis = RedisState(process=process, port=server.port, log_path=str(server.log_path))
    return _saved(replace(cluster, redis_url=server.url, redis=redis))


def _start_ray(cluster: ClusterState, options: UpOptions, report: Report) -> ClusterState:
    if options.address is not None:
        # Remembered only once it has answered: nothing of ours is there before.
        return replace(cluster, ray_address=options.address)
    stage = Progress(stage="starting Ray and its dashboard")
    report(stage)
    assert cluster.directory is not None
    head = ray_head.start_head(
        Path(cluster.directory),
        num_cpus=len(os.sched_getaffinity(0)),
        spawned=lambda session: state.save(replace(cluster, head=_head_state(session))),
        waiting=lambda: report(stage),
    )
    return _saved(
        replace(
            cluster,
            ray_address=head.address,
            ray_token_path=str(head.token_path),
            head=_head_state(head.session),
        )
    )


def _head_state(session: int) -> HeadState:
    return HeadState(session=session, processes=tuple(session_members(session)))


def _start_serving(cluster: ClusterState, options: UpOptions, report: Report) -> ClusterState:
    with on_ray.driver(cluster) as info:
        state.save(cluster)
        hardware = on_ray.hardware()
        num_workers, num_gpus = _workers_to_place(options, hardware.num_gpus)
        share = options.cpus_per_worker or cpus_per_worker(hardware.node_cpus, num_workers)
        num_cpus = min(share, MAX_CPUS_BESIDE_GPU) if num_gpus else share
        on_ray.create_supervisor(_spec(cluster, options, num_workers, num_gpus, num_cpus))
        dashboard = info.get("webui_url")
        cluster = _saved(
            replace(
                cluster,
                num_workers=num_workers,
                dashboard_url=f"http://{dashboard}" if dashboard else None,
                metrics_port=info.get("metrics_export_port"),
                logs_directory=str(Path(info["session_dir"]) / "logs"),
            )
        )
        routers = _wait_until_all_serve(report)
    cluster = _saved(replace(cluster, routers=routers))
    _wait_until_connected(cluster, report)
    return cluster


def _workers_to_place(options: UpOptions, gpus_of_cluster: float) -> tuple[int, float]:
    """How many, and how many GPUs each takes."""
    if options.engine.device == "cpu" or gpus_of_cluster < 1:
        if options.engine.device == "cuda":
            raise ClusterStartError("--device cuda, but the Ray cluster has no GPU")
        return options.num_workers or 1, 0.0
    return options.num_workers or int(gpus_of_cluster), 1.0


def _spec(
    cluster: ClusterState, options: UpOptions, num_workers: int, num_gpus: float, num_cpus: float
) -> "ClusterSpec":
    from blockyard.deploy.supervisor import ClusterSpec

    # On a cluster of several nodes everyone is reached by the address of the node it lands on.
    host = "127.0.0.1" if options.address is None else ""
    worker = WorkerConfig(
        engine=options.engine,
        cluster=cluster.cluster,
        cluster_secret=cluster.secret,
        host=host,
        redis_url=cluster.redis_url,
    )
    router = RouterConfig(
        model=options.engine.model,
        model_name=options.model_name,
        cluster=cluster.cluster,
        cluster_secret=cluster.secret,
        host=host,
        port=options.router_port,
        redis_url=cluster.redis_url,
        policy=options.policy,
        max_outputs=options.max_outputs,
        max_beam_width=options.max_beam_width,
    )
    return ClusterSpec(
        namespace=on_ray.namespace(cluster.cluster),
        worker=worker,
        num_workers=num_workers,
        num_cpus_per_worker=num_cpus,
        num_gpus_per_worker=num_gpus,
        router=router,
        num_routers=options.num_routers,
    )


def _wait_until_all_serve(report: Report) -> tuple[str, ...]:
    """Returns the routers' addresses. Raises ClusterStartError when one keeps failing, with its reason."""
    deadline = time.monotonic() + SERVE_SECONDS
    while time.monotonic() < deadline:
        everyone = on_ray.supervisor_report().places
        serving = [place for place in everyone if place.phase == "serving"]
        report(Progress(stage="loading the model", done=len(serving), total=len(everyone)))
        if len(serving) == len(everyone):
            return tuple(place.address for place in everyone if place.kind == "router")
        for place in everyone:
            # The supervisor would go on trying; a command had better say at once what is wrong.
            if place.error and not place.num_starts:
                raise ClusterStartError(f"{place.name} does not start: {place.error}")
        time.sleep(_POLL_SECONDS)
    waiting = [place.name for place in on_ray.supervisor_report().places if place.phase != "serving"]
    raise ClusterStartError(f"{', '.join(waiting)} did not serve within {SERVE_SECONDS:.0f} s")


def _wait_until_connected(cluster: ClusterState, report: Report) -> None:
    """Until every router has a session with every worker."""
    deadline = time.monotonic() + CONNECT_SECONDS
    for address in cluster.routers:
        with Client(address, timeout_seconds=CONNECT_SECONDS) as client:
            while (ready := client.cluster_info().workers_ready) < cluster.num_workers:
                report(Progress(stage="joining routers and workers", done=ready, total=cluster.num_workers))
                if time.monotonic() > deadline:
                    raise ClusterStartError(
                        f"the router at {address} reaches {ready} of {cluster.num_workers} workers"
                    )
                time.sleep(_POLL_SECONDS)


def _redis_process(cluster: ClusterState, redis: RedisState) -> RedisProcess:
    return RedisProcess(
        url=cluster.redis_url or "", port=redis.port, pid=redis.process.pid, log_path=Path(redis.log_path)
    )


def _saved(cluster: ClusterState) -> ClusterState:
    state.save(cluster)
    return cluster
