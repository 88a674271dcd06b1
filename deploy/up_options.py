"""The settings of `up`, and what they make: UpOptions. `config show` has the same ones.

Gathers the groups of settings that options.py, limits.py and security.py define, and owns those of the cluster as a
whole. Does not own what is done with them (cluster.py).
"""

from typing import Any, get_args

import click
from blockyard.deploy.config_file import config_option
from blockyard.deploy.limits import limit_options, router_limits, worker_limits
from blockyard.deploy.options import (
    cluster_option,
    engine_config,
    engine_options,
    placement_options,
    served_name,
)
from blockyard.deploy.places import DEFAULT_HUNG_SECONDS
from blockyard.deploy.redis_given import checked_redis_url
from blockyard.deploy.redis_server import REDIS_URL_VARIABLE
from blockyard.deploy.security import security, security_options
from blockyard.deploy.settings import Command, checked_by, setting, wrong_values_are_usage
from blockyard.deploy.shared_port import MAX_PORT
from blockyard.deploy.wanted_cluster import UpOptions
from blockyard.proto.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogConfig, LogFormat, LogLevel
from blockyard.router.config import DEFAULT_MAX_BEAM_WIDTH, DEFAULT_MAX_OUTPUTS, checked_origins
from blockyard.router.model_facts import GenerationConfig

ROUTER_REDIS_URL_VARIABLE = "BLOCKYARD_ROUTER_REDIS_URL"
_PORT = click.IntRange(0, MAX_PORT)
_OF_THE_CLUSTER = (
    setting(
        "cluster", "--model-name", help="What clients call the model. Default: the last part of --model."
    ),
    setting(
        "cluster",
        "--generation-config",
        type=click.Choice(get_args(GenerationConfig)),
        default="auto",
        show_default=True,
        help="Sampling defaults for what a request leaves open: `auto` takes those of the model's "
        "generation_config.json, `none` ignores them.",
    ),
    setting(
        "cluster",
        "--workers",
        "num_workers",
        type=int,
        help="Default: one for each GPU, or one on the CPU.",
    ),
    setting(
        "cluster",
        "--routers",
        "num_routers",
        type=int,
        default=1,
        show_default=True,
        help="Each serves any client.",
    ),
    setting(
        "cluster", "--router-port", type=_PORT, default=0, help="Where the routers serve; 0 takes a free one."
    ),
    setting(
        "cluster",
        "--http-port",
        type=_PORT,
        help="Serve OpenAI's API (docs/gateway.md) here too; 0 takes a free one. Default: do not.",
    ),
    setting(
        "cluster",
        "cors_origins",
        "--cors-origin",
        multiple=True,
        callback=checked_by(checked_origins),
        metavar="ORIGIN",
        help="Web pages from here, such as https://chat.example, may call --http-port; may be given more than once.",
    ),
    setting(
        "cluster",
        "--separate-ports",
        is_flag=True,
        help="A port for each router, from --router-port on, instead of one for all.",
    ),
    setting("cluster", "--cpus-per-worker", type=float, help="Default: the cluster's CPUs in equal shares."),
    setting(
        "cluster", "--address", help="An existing Ray cluster, host:port. Default: a local one is started."
    ),
    setting(
        "cluster",
        "--ship-code",
        "ships_code",
        is_flag=True,
        help="With --address: give the nodes this command's own code, whatever they have installed.",
    ),
    setting(
        "cluster",
        "--router-resource",
        metavar="NAME",
        help="With --address: routers run only on nodes with this Ray resource, one for each unit of it.",
    ),
    setting(
        "cluster",
        "--live-page-in-metrics-tab",
        is_flag=True,
        help="Without Grafana: the live page fills the Metrics tab of Ray's dashboard, in place of Ray's own charts.",
    ),
)
_OF_REQUESTS = (
    setting(
        "limits",
        "--hung-seconds",
        type=float,
        default=DEFAULT_HUNG_SECONDS,
        show_default=True,
        help="A worker or router that answers its supervisor nothing for so long is killed and started again.",
    ),
    setting(
        "limits",
        "--max-outputs",
        type=int,
        default=DEFAULT_MAX_OUTPUTS,
        show_default=True,
        help="The most outputs (`n`) that a request may ask for.",
    ),
    setting(
        "limits",
        "--max-beam-width",
        type=int,
        default=DEFAULT_MAX_BEAM_WIDTH,
        show_default=True,
        help="The most beams that a request may ask for.",
    ),
)
_OF_THE_INDEX = (
    setting(
        "redis",
        "--redis-url",
        envvar=REDIS_URL_VARIABLE,
        is_secret=True,
        callback=checked_redis_url(REDIS_URL_VARIABLE),
        help="Default: a private Redis is started. With a password: only by the variable.",
    ),
    setting(
        "redis",
        "--router-redis-url",
        envvar=ROUTER_REDIS_URL_VARIABLE,
        is_secret=True,
        callback=checked_redis_url(ROUTER_REDIS_URL_VARIABLE),
        help="The same Redis as a user that only reads, for routers (SECURITY.md). Default: --redis-url.",
    ),
)
_OF_LOGS = (
    setting(
        "logs",
        "--log-level",
        type=click.Choice(get_args(LogLevel)),
        default="info",
        show_default=True,
        envvar=LEVEL_VARIABLE,
        help="Of routers and workers.",
    ),
    setting(
        "logs",
        "--log-format",
        type=click.Choice(get_args(LogFormat)),
        default="text",
        show_default=True,
        envvar=FORMAT_VARIABLE,
        help="`json`: one object a line, with the request's id.",
    ),
)
_GROUPS = (
    config_option,
    cluster_option,
    engine_options,
    *_OF_THE_CLUSTER,
    placement_options,
    *_OF_REQUESTS,
    limit_options,
    security_options,
    *_OF_THE_INDEX,
    *_OF_LOGS,
)


def up_settings(command: Command) -> Command:
    """Adds all of them; `up_options` takes them back."""
    for add in reversed(_GROUPS):
        command = add(command)
    return command


def up_options(values: dict[str, Any]) -> UpOptions:
    """Takes the settings out of a command's arguments, all of them. Raises click's UsageError for a value that cannot
    be, whatever names it."""
    with wrong_values_are_usage():
        return _up_options(values)


def _up_options(values: dict[str, Any]) -> UpOptions:
    model_name = values.pop("model_name") or served_name(values["model"])
    return UpOptions(
        engine=engine_config(values),
        model_name=model_name,
        limits=router_limits(values),
        worker_limits=worker_limits(values),
        security=security(values),
        log=LogConfig(level=values.pop("log_level"), format=values.pop("log_format")),
        **values,
    )
