"""The settings of `up`, and what they make: UpOptions. `config show` has the same ones.

Gathers the groups of settings that options.py, limits.py and security.py define, and owns those of the cluster as a
whole. Does not own what is done with them (lifecycle/cluster.py).
"""

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args

import click
from blockyard.deploy.machine.redis_server import REDIS_URL_VARIABLE
from blockyard.deploy.settings.config_file import config_option
from blockyard.deploy.settings.limits import limit_options, router_limits, worker_limits
from blockyard.deploy.settings.options import (
    cluster_option,
    engine_config,
    engine_options,
    placement_options,
    served_names,
)
from blockyard.deploy.settings.redis_given import checked_redis_url
from blockyard.deploy.settings.security import security, security_options
from blockyard.deploy.settings.setting import Command, checked_by, setting, wrong_values_are_usage
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.supervision.replicas import DEFAULT_HUNG_SECONDS
from blockyard.proto.limits import MAX_PORT
from blockyard.proto.metrics.readings import MetricNames
from blockyard.proto.runtime.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogConfig, LogFormat, LogLevel
from blockyard.proto.security.loopback import LOOPBACK, with_brackets, without_brackets
from blockyard.router.config import DEFAULT_MAX_BEAM_WIDTH, DEFAULT_MAX_OUTPUTS, checked_origins
from blockyard.router.tokenizing.model_facts import GenerationConfig

ROUTER_REDIS_URL_VARIABLE = "BLOCKYARD_ROUTER_REDIS_URL"
UP_PORTS: Mapping[str, int | None] = {"router_port": 0, "http_port": None}
SERVE_PORTS: Mapping[str, int | None] = {"router_port": 50051, "http_port": 8000}
MAX_TEMPLATE_BYTES = 2**20
_PORT = click.IntRange(0, MAX_PORT)


def _checked_host(host: str) -> str:
    """Returns it as addresses have it. Raises ValueError."""
    try:
        if not host or (":" in host and ip_address(without_brackets(host)).version != 6):
            raise ValueError
    except ValueError:
        raise ValueError(f"is an address without port, such as 127.0.0.1, not {host!r}") from None
    return with_brackets(host)


def _text_of(file: str) -> str:
    """Read a chat template. Raises ValueError."""
    try:
        content = Path(file).read_bytes()
        if len(content) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"is longer than {MAX_TEMPLATE_BYTES:,} bytes: {file}")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read ({type(error).__name__}): {file}") from None


_OF_THE_CLUSTER = (
    setting(
        "cluster",
        "--model-name",
        "model_names",
        group="Model",
        multiple=True,
        help="What clients call the model: the first is its id, others are aliases that requests may use. Default: a "
        "hub model's full name and its short one, a folder's last part.",
    ),
    setting(
        "cluster",
        "--revision",
        group="Model",
        metavar="REVISION",
        help="A branch, tag or commit of a hub model. Default: its main branch.",
    ),
    setting(
        "cluster",
        "--chat-template",
        group="Model",
        type=click.Path(dir_okay=False),
        callback=checked_by(_text_of),
        help="A Jinja template for chats. Default: the tokenizer's own.",
    ),
    setting(
        "cluster",
        "--download-dir",
        group="Model",
        type=click.Path(file_okay=False, resolve_path=True),
        help="Where files from the hub are kept. Default: what HF_HUB_CACHE or HF_HOME says.",
    ),
    setting(
        "cluster",
        "--generation-config",
        group="Model",
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
        "cluster",
        "--host",
        group="Addresses",
        default=LOOPBACK,
        show_default=True,
        callback=checked_by(_checked_host),
        help="The address that routers bind, with --address too: by default none but their own machine reaches them; "
        "0.0.0.0 is all of its interfaces.",
    ),
    setting(
        "cluster",
        "--router-port",
        group="Addresses",
        type=_PORT,
        help="Where gRPC is served; 0 takes a free one. Default: a free one; of `serve` "
        f"{SERVE_PORTS['router_port']}, or the next that is free.",
    ),
    setting(
        "cluster",
        "--http-port",
        group="Addresses",
        type=_PORT,
        help="Where OpenAI's API (docs/gateway.md) is served; 0 takes a free one. Default: it is not; of `serve` "
        f"{SERVE_PORTS['http_port']}, or the next that is free.",
    ),
    setting(
        "cluster",
        "cors_origins",
        "--cors-origin",
        group="Addresses",
        multiple=True,
        callback=checked_by(checked_origins),
        metavar="ORIGIN",
        help="Web pages from here, such as https://chat.example, may call --http-port; may be given more than once.",
    ),
    setting(
        "cluster",
        "--separate-ports",
        group="Addresses",
        is_flag=True,
        help="A port for each router, from --router-port on, instead of one for all.",
    ),
    setting("cluster", "--cpus-per-worker", type=float, help="Default: the cluster's CPUs in equal shares."),
    setting(
        "cluster",
        "--address",
        group="Existing Ray cluster",
        help="An existing Ray cluster, host:port. Default: a local one is started.",
    ),
    setting(
        "cluster",
        "--ship-code",
        "ships_code",
        group="Existing Ray cluster",
        is_flag=True,
        help="With --address: give the nodes this command's own code, whatever they have installed.",
    ),
    setting(
        "cluster",
        "--router-resource",
        group="Existing Ray cluster",
        metavar="NAME",
        help="With --address: routers run only on nodes with this Ray resource, one for each unit of it.",
    ),
    setting(
        "cluster",
        "--live-page-in-metrics-tab",
        is_flag=True,
        help="Without Grafana: the live page fills the Metrics tab of Ray's dashboard, in place of Ray's own charts.",
    ),
    setting(
        "cluster",
        "--metrics-names",
        type=click.Choice(get_args(MetricNames)),
        default="blockyard",
        show_default=True,
        help="`vllm`: the gateway's /metrics has vLLM's names beside ours, for dashboards made for vLLM.",
    ),
)
_OF_REQUESTS = (
    setting(
        "limits",
        "--hung-seconds",
        group="Failures",
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


def up_options(values: dict[str, Any], *, default_ports: Mapping[str, int | None] = UP_PORTS) -> UpOptions:
    """Takes the settings out of a command's arguments, all of them. A port that was not asked for is the default one,
    or the next that is free. Raises click's UsageError for a value that cannot be, whatever names it."""
    with wrong_values_are_usage():
        return _up_options(values, default_ports)


def _up_options(values: dict[str, Any], default_ports: Mapping[str, int | None]) -> UpOptions:
    model_names = values.pop("model_names") or served_names(values["model"])
    movable_ports = frozenset(name for name in default_ports if values[name] is None)
    values |= {name: default_ports[name] for name in movable_ports}
    return UpOptions(
        engine=engine_config(values),
        model_names=model_names,
        movable_ports=movable_ports,
        limits=router_limits(values),
        worker_limits=worker_limits(values),
        security=security(values),
        log=LogConfig(level=values.pop("log_level"), format=values.pop("log_format")),
        **values,
    )
