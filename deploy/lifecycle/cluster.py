"""Starts and ends a cluster: Redis, Ray, the supervisor, and the state file that records them.

Owns the order of steps, and undoing a start that failed or was interrupted. Does not own how each part runs.

    up:   state file -> private Redis -> Ray head -> supervisor -> workers + routers serve
          (with --address, the running Ray is checked first, and then Redis is started)

    down: routers drain, workers deregister -> supervisor -> Ray's session -> Redis -> files -> state file
"""

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.lifecycle import hub, models, preflight
from blockyard.deploy.lifecycle.cluster_spec import spec_of
from blockyard.deploy.lifecycle.serving import Progress, Report, wait_until_all_serve, wait_until_connected
from blockyard.deploy.lifecycle.shape import shape_on
from blockyard.deploy.machine import state
from blockyard.deploy.machine.interruption import raise_if_asked, undisturbed
from blockyard.deploy.machine.processes import (
    boot_id,
    end_session,
    identify,
    is_alive,
    owns_session,
    session_members,
)
from blockyard.deploy.machine.redis_server import (
    RedisProcess,
    private_server_warning,
    redis_user,
    start_private_redis,
)
from blockyard.deploy.machine.shared_port import reserved_port
from blockyard.deploy.machine.state import ClusterState, HeadState, RedisState
from blockyard.deploy.ray import head as ray_head
from blockyard.deploy.ray import nodes
from blockyard.deploy.ray.nodes import NodeFacts
from blockyard.deploy.ray.shipping import shipped
from blockyard.deploy.settings import redis_given
from blockyard.deploy.settings.options import further_model
from blockyard.deploy.settings.page_token import draw_page_token
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.proto.security.loopback import is_loopback
from blockyard.router.config import RouterConfig

DRAIN_SECONDS = 5.0
STARTING_RAY = "starting Ray and its dashboard"
DRAINING = "draining routers and stopping workers"
LOOPBACK_AMONG_HOSTS = (
    "this Ray cluster has several machines, and each router accepts only programs on its own machine: --host opens it "
    "to others"
)
UNLIKE_CPUS = "only some nodes' CPUs have bfloat16 instructions: all workers compute in float32 (see --dtype)"
MAX_TEMP_LENGTH = 25
"""Limit on the temporary folder's path. A Unix socket's path has at most 107 characters. Ray and we add about 80."""


def up(options: UpOptions, report: Report = lambda progress: None) -> ClusterState:
    """Start a cluster and return once every worker and router serves. Undo everything on any failure or Ctrl-C.

    Raise ClusterStartError, RedisStartError, RayStartError, RayConnectError or NameTakenError. Raise ValueError for a
    cluster that is up or starting, and for options or a model that cannot work.
    """
    try:
        refuse_if_up(options.cluster)
    except ValueError:
        # The operator should learn about a wrong model before ending the running cluster for it.
        preflight.check_model(options)
        raise
    options, moved_ports = preflight.ports_moved(options)
    preflight.check(options)
    for warning in (*moved_ports, *filter(None, (options.exposure, preflight.crowding(options)))):
        report(Progress(stage="checking this machine", warning=warning))
    with redis_given.claimed(options) as keep_claim:
        for warning in redis_given.check(options):
            report(Progress(stage="checking Redis", warning=warning))
        if options.address is not None:
            ray_head.check_listening(options.address)
        cluster = _take_name(options)

        def report_and_check(progress: Progress) -> None:
            raise_if_asked()
            keep_claim()
            report(progress)

        return _up(cluster, options, report_and_check, report)


def _take_name(options: UpOptions) -> ClusterState:
    """Save a state file for the cluster, and remove the files of a crashed one of its name.

    From now on, another `up` of this name with this BLOCKYARD_HOME is refused.
    """
    with state.alone():
        left = refuse_if_up(options.cluster)
        if left is not None and left.directory is not None:
            shutil.rmtree(left.directory, ignore_errors=True)
        cluster = ClusterState(
            cluster=options.cluster,
            model=", ".join(model.id for model in options.served_models),
            secret=secrets.token_hex(32),
            directory=str(_make_directory()),
            host=options.host,
            starter=identify(os.getpid()),
            identity=secrets.token_hex(8),
            machine=socket.gethostname(),
            boot_id=boot_id(),
        )
        return _saved(cluster)


def _up(cluster: ClusterState, options: UpOptions, report_and_check: Report, report: Report) -> ClusterState:
    try:
        if options.address is None:
            for one in options.each_model():
                hub.download_all(one.engine.model, one.engine.tokenizer, report)
                preflight.check_weights(one.engine)
                if one.engine.draft_model is not None:
                    hub.download(one.engine.draft_model, report)
                    preflight.check_draft(one.engine)
            cluster = _start_redis(cluster, options, report_and_check)
        cluster = _start_ray(cluster, options, report_and_check)
        cluster = _start_serving(cluster, options, report_and_check)
        cluster = _add(cluster, options, report_and_check)
        raise_if_asked()
        return cluster
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
    """Stop what `up` started, and remove its files. Routers first drain for at most `drain_seconds`.

    On a Ray cluster that we joined, only our actors end, and Ray must answer. With `forget`, Ray is not asked to drain
    and end actors.
    """
    report(Progress(stage=DRAINING))
    if not forget:
        _say_goodbye(cluster, drain_seconds, report)
    report(Progress(stage="stopping processes"))
    if cluster.head is not None:
        end_session(cluster.head.session, cluster.head.processes)
    if cluster.redis is not None and identify(cluster.redis.process.pid) == cluster.redis.process:
        _redis_process(cluster, cluster.redis).stop()
    _remove_files(cluster)


def answering(cluster: ClusterState) -> list[str]:
    """Return those addresses of a cluster's Ray and its routers that still take connections."""
    addresses = dict.fromkeys(filter(None, (cluster.ray_address, *cluster.routers)))
    return [address for address in addresses if ray_head.takes_connections(address)]


def leftovers(cluster: ClusterState) -> list[str]:
    """Return the processes and files that are left of a cluster after `down`. Anything means that `down` has failed."""
    left = [f"process {process.pid}" for process in cluster.recorded_processes() if is_alive(process)]
    if cluster.head is not None:
        left += [f"process {process.pid}" for process in session_members(cluster.head.session)]
    paths = (cluster.directory and Path(cluster.directory), state.state_path(cluster.cluster))
    return sorted({*left, *(str(path) for path in paths if path and path.exists())})


def _say_goodbye(cluster: ClusterState, drain_seconds: float, report: Report) -> None:
    if cluster.ray_address is None or not cluster.is_supervised:
        return
    with ray_head.words_kept(Path(cluster.directory or os.devnull) / "goodbye.log"):
        if cluster.head is None:
            with on_ray.driver(cluster):
                on_ray.shut_down(drain_seconds)
        elif owns_session(cluster.head.session, cluster.head.processes):
            try:
                with on_ray.driver(cluster):
                    on_ray.shut_down(drain_seconds)
            except Exception as error:
                # A Ray that no longer answers must not prevent ending its processes.
                warning = f"routers and workers are killed, not drained: Ray does not answer ({type(error).__name__})"
                report(Progress(stage=DRAINING, warning=warning))


def refuse_if_up(cluster: str) -> ClusterState | None:
    """Return what a crashed cluster of this name has left, or None. Raise ValueError if the cluster is up."""
    try:
        existing = state.load(cluster)
    except state.NoSuchClusterError:
        return None
    if existing.anything_alive():
        raise ValueError(
            f"cluster {cluster!r} is up already: use it, or `blockyard down --cluster {cluster}`, or name "
            "another by --cluster"
        )
    return existing


def _remove_files(cluster: ClusterState) -> None:
    if cluster.directory is not None:
        shutil.rmtree(cluster.directory, ignore_errors=True)
    state.forget(cluster)


def _make_directory() -> Path:
    """Create a folder with a path short enough for Ray's sockets, whatever TMPDIR is."""
    parent = tempfile.gettempdir()
    directory = Path(tempfile.mkdtemp(prefix="by-", dir=parent if len(parent) <= MAX_TEMP_LENGTH else "/tmp"))
    return directory.resolve()


def _start_redis(cluster: ClusterState, options: UpOptions, report: Report) -> ClusterState:
    url = options.given_redis_url
    if url is not None:
        return _saved(replace(cluster, redis_url=url, router_redis_url=options.router_redis_url or url))
    report(Progress(stage="starting Redis"))
    assert cluster.directory is not None
    worker, router = redis_user("worker", cluster.cluster), redis_user("router", cluster.cluster)
    server = start_private_redis(
        Path(cluster.directory) / "redis", password=secrets.token_hex(16), users=(worker, router)
    )
    version = redis_given.look(server.url).version
    report(
        Progress(stage="starting Redis", detail=str(version or ""), warning=private_server_warning(version))
    )
    process = identify(server.pid)
    assert process is not None
    redis = RedisState(process=process, port=server.port, log_path=str(server.log_path))
    return _saved(
        replace(cluster, redis_url=server.url_of(worker), router_redis_url=server.url_of(router), redis=redis)
    )


def _start_ray(cluster: ClusterState, options: UpOptions, report: Report) -> ClusterState:
    if options.address is not None:
        # Not saved yet: before this Ray has answered, nothing of ours runs there.
        token_path = ray_head.operators_token_path()
        return replace(cluster, ray_address=options.address, ray_token_path=token_path)
    stage = Progress(stage=STARTING_RAY)
    report(stage)
    assert cluster.directory is not None
    guarded = options.security.auth_file is not None
    head = ray_head.start_head(
        Path(cluster.directory),
        page_token_path=draw_page_token(Path(cluster.directory)) if guarded else None,
        page_in_metrics_tab=options.live_page_in_metrics_tab,
        num_cpus=len(os.sched_getaffinity(0)),
        spawned=lambda session: state.save(replace(cluster, head=_head_state(session))),
        waiting=lambda: report(stage),
    )
    return _saved(
        replace(
            cluster,
            ray_address=head.address,
            ray_token_path=str(head.token_path),
            reconnect_seconds=ray_head.reconnect_seconds(),
            head=_head_state(head.session),
        )
    )


def _head_state(session: int) -> HeadState:
    return HeadState(session=session, processes=tuple(session_members(session)))


def _start_serving(cluster: ClusterState, options: UpOptions, report: Report) -> ClusterState:
    with (
        shipped() if options.ships_code else contextlib.nullcontext() as wheel,
        on_ray.driver(cluster, wheel) as info,
    ):
        on_ray.refuse_if_taken(cluster.cluster)
        state.save(cluster)
        asked: list[NodeFacts] = []
        if options.address is not None:
            report(Progress(stage="comparing the nodes"))
            asked = nodes.ask_nodes()
            if wheel is None:
                nodes.check_code(asked)
            if warning := nodes.short_reconnect(asked):
                report(Progress(stage="comparing the nodes", warning=warning))
            cluster = replace(cluster, reconnect_seconds=nodes.reconnect_seconds(asked))
        hardware = on_ray.hardware()
        other_hosts = preflight.other_hosts()
        preflight.check_reachable(other_hosts, has_private_redis=options.given_redis_url is None)
        if other_hosts and is_loopback(options.host):
            report(Progress(stage="checking the nodes", warning=LOOPBACK_AMONG_HOSTS))
        shape = shape_on(options, hardware)
        if options.address is not None:
            if not shape.num_gpus:
                options = with_one_dtype(options, asked, report)
            cluster = _start_redis(cluster, options, report)
        dashboard = info.get("webui_url")
        if cluster.head is not None and dashboard and (moved := ray_head.moved_dashboard(dashboard)):
            report(Progress(stage=STARTING_RAY, warning=moved))
        cluster = _saved(
            replace(
                cluster,
                num_workers=shape.all_workers,
                cpus_per_worker=shape.num_cpus,
                dashboard_url=f"http://{dashboard}" if dashboard else None,
                metrics_port=info.get("metrics_export_port"),
                node_address=info.get("node_ip_address") or cluster.node_address,
                logs_directory=str(Path(info["session_dir"]) / "logs"),
            )
        )
        spec = spec_of(cluster, options, shape)
        with _router_ports(spec.router) as router:
            report(Progress(stage="starting the supervisor"))
            on_ray.create_supervisor(replace(spec, router=router))
            cluster = _saved(replace(cluster, is_supervised=True))
            serving = wait_until_all_serve(report)
        cluster = _saved(
            replace(cluster, routers=serving.routers, gateways=serving.gateways, dtypes=serving.dtypes)
        )
        wait_until_connected(shape.all_workers, report)
    return cluster


def _add(cluster: ClusterState, options: UpOptions, report: Report) -> ClusterState:
    """Add the models and adapters beside the first model. An adapter that cannot be added is a warning."""
    for added in options.additions.models:
        models.add(
            cluster,
            further_model(
                added.model, names=added.names, tokenizer=added.tokenizer, chat_template=added.chat_template
            ),
            num_workers=added.workers,
            settings=added.settings,
            cpus_per_worker=added.cpus_per_worker,
            waits_for_nodes=False,
            report=report,
        )
        cluster = state.load(cluster.cluster)
    for warning in models.add_adapters(cluster, options):
        report(Progress(stage="adding adapters", warning=warning))
    return cluster


def with_one_dtype(options: UpOptions, asked: Sequence[NodeFacts], report: Report) -> UpOptions:
    """Return the options, with float32 and a warning if workers on these CPUs would choose different data types."""
    if options.engine.dtype != "auto" or not nodes.differ_in_bfloat16(asked):
        return options
    report(Progress(stage="comparing the nodes", warning=UNLIKE_CPUS))
    return replace(options, engine=replace(options.engine, dtype="float32"))


@contextlib.contextmanager
def _router_ports(router: RouterConfig) -> Iterator[RouterConfig]:
    """Yield the routers' config with ports that all share, on other nodes too. Reserve the ports inside the block.

    Yield an unchanged config if routers share no ports.
    """
    if not router.reuse_port:
        yield router
        return
    with reserved_port(router.host, router.port) as port, contextlib.ExitStack() as stack:
        http_port = router.http_port
        if http_port is not None:
            http_port = stack.enter_context(reserved_port(router.host, http_port))
        yield replace(router, port=port, http_port=http_port)


def _redis_process(cluster: ClusterState, redis: RedisState) -> RedisProcess:
    return RedisProcess(
        url=cluster.redis_url or "", port=redis.port, pid=redis.process.pid, log_path=Path(redis.log_path)
    )


def _saved(cluster: ClusterState) -> ClusterState:
    state.save(cluster)
    return cluster
