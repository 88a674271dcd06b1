"""Builds the ClusterSpec: the configuration of every worker and router, and their number, for the supervisor.

Pure. It combines the operator's options (settings/wanted_cluster.py), the state file (machine/state.py) and the shape
of workers (shape.py).
"""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from blockyard.deploy.lifecycle.shape import Shape
from blockyard.deploy.machine.state import ClusterState, handle_of
from blockyard.deploy.settings.page_token import page_token_sha256
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.security.loopback import LOOPBACK, is_every_interface
from blockyard.router.config import RouterConfig
from blockyard.worker.config import WorkerConfig

if TYPE_CHECKING:
    from blockyard.deploy.supervision.replicas import ClusterSpec


def spec_of(cluster: ClusterState, options: UpOptions, shape: Shape) -> "ClusterSpec":
    """Return the spec from which the supervisor starts a cluster's workers and routers."""
    from blockyard.deploy.supervision.model_plans import ModelPlan
    from blockyard.deploy.supervision.replicas import ClusterSpec, namespace

    return ClusterSpec(
        namespace=namespace(cluster.cluster),
        worker=_worker_of(cluster, options),
        num_workers=shape.num_workers,
        num_prefill_workers=options.num_prefill_workers,
        num_cpus_per_worker=shape.num_cpus,
        num_gpus_per_worker=shape.num_gpus,
        router=_router_of(cluster, options),
        num_routers=options.num_routers,
        further_models=tuple(
            ModelPlan(
                served=model,
                engine=replace(options.engine, model=model.model),
                num_workers=shape.num_workers,
                num_cpus_per_worker=shape.num_cpus,
                num_gpus_per_worker=shape.num_gpus,
            )
            for model in options.served_models[1:]
        ),
        router_resource=options.router_resource,
        hung_seconds=options.hung_seconds,
        code="" if options.address is None else code_version(),
        handle=handle_of(cluster) | {"settings": options.written, "engine": asdict(options.engine)},
    )


def _worker_of(cluster: ClusterState, options: UpOptions) -> WorkerConfig:
    # On a cluster of several nodes, routers connect to a worker by the address of its node.
    worker_host = LOOPBACK if options.address is None else ""
    return WorkerConfig(
        engine=options.engine,
        stall_seconds=options.limits.stall_seconds,
        cluster=cluster.cluster,
        cluster_secret=cluster.secret,
        metrics_names=options.metrics_names,
        model_name=options.served_names[0],
        session_tls=options.security.session_tls,
        host=worker_host,
        redis_url=cluster.redis_url,
        log=options.log,
        **options.worker_limits.as_settings(),
    )


def _router_of(cluster: ClusterState, options: UpOptions) -> RouterConfig:
    # The commands and the live page of a local cluster are on this machine.
    advertise_host = LOOPBACK if options.address is None and is_every_interface(options.host) else None
    return RouterConfig(
        model=options.engine.model,
        tokenizer=options.engine.tokenizer,
        chat_template=options.chat_template,
        model_names=options.served_names,
        generation_config=options.generation_config,
        cluster=cluster.cluster,
        cluster_secret=cluster.secret,
        host=options.host,
        advertise_host=advertise_host,
        port=options.router_port,
        http_port=options.http_port,
        cors_origins=options.cors_origins,
        reuse_port=options.num_routers > 1 and not options.separate_ports,
        redis_url=cluster.router_redis_url,
        discovers_workers=False,
        auth_file=options.security.auth_file,
        page_token_sha256=page_token_sha256(cluster.directory),
        tls=options.security.tls,
        session_tls=options.security.session_tls,
        policy=options.policy,
        no_pull=options.no_pull,
        placement=options.placement,
        metrics_names=options.metrics_names,
        priority_ageing_seconds=options.engine.priority_ageing_seconds,
        log=options.log,
        **options.limits.as_settings(),
    )
