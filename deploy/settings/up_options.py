"""Settings of `up` and `config show`, and the UpOptions that they make.

Gathers the settings of config_options.py, options.py and security.py, and those of the cluster as a whole, which follow
from the fields of UpOptions. Does not own their use (lifecycle/cluster.py).
"""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, get_args

import click
from blockyard.deploy.machine.redis_server import REDIS_URL_VARIABLE
from blockyard.deploy.settings.config_file import ADDITIONS_KEY, config_option
from blockyard.deploy.settings.config_options import (
    engine_config,
    engine_options,
    limit_options,
    placement_options,
)
from blockyard.deploy.settings.exported import additions_of, written_settings
from blockyard.deploy.settings.options import (
    RAY_ADDRESS_VARIABLE,
    cluster_option,
    kept_model,
    ray_address,
    served_names,
    text_of,
)
from blockyard.deploy.settings.redis_given import checked_redis_url
from blockyard.deploy.settings.security import security, security_options
from blockyard.deploy.settings.setting import (
    VARIABLE_PREFIX,
    Command,
    checked_by,
    field_setting,
    field_settings,
    setting,
    taken,
    wrong_values_are_usage,
)
from blockyard.deploy.settings.wanted_cluster import SERVE_PORTS as SERVE_PORTS
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.proto.limits import MAX_PORT
from blockyard.proto.runtime.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogConfig, LogFormat, LogLevel
from blockyard.proto.security.loopback import with_brackets, without_brackets
from blockyard.router.config import RouterConfig, RouterLimits
from blockyard.worker.config import WorkerLimits

ROUTER_REDIS_URL_VARIABLE = "BLOCKYARD_ROUTER_REDIS_URL"
UP_PORTS: Mapping[str, int | None] = {"router_port": 0, "http_port": None}
_PORT = click.IntRange(0, MAX_PORT)


def _checked_host(host: str) -> str:
    """Return a host, with brackets around an IPv6 address. Raise ValueError for an empty host or one with a port."""
    try:
        if not host or (":" in host and ip_address(without_brackets(host)).version != 6):
            raise ValueError
    except ValueError:
        raise ValueError(f"is an address without port, such as 127.0.0.1, not {host!r}") from None
    return with_brackets(host)


def _kept(models: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(kept_model, models))


_OF_THE_CLUSTER = field_settings(
    UpOptions,
    "cluster",
    chat_template={"type": click.Path(dir_okay=False), "callback": checked_by(text_of)},
    further_models={"callback": checked_by(_kept)},
    download_dir={"type": click.Path(file_okay=False, resolve_path=True)},
    host={"callback": checked_by(_checked_host)},
    router_port={"type": _PORT, "default": None, "show_default": False},
    http_port={"type": _PORT},
    address={"envvar": (f"{VARIABLE_PREFIX}ADDRESS", RAY_ADDRESS_VARIABLE)},
    hung_seconds={"section": "limits"},
    redis_url={
        "section": "redis",
        "envvar": REDIS_URL_VARIABLE,
        "is_secret": True,
        "callback": checked_redis_url(REDIS_URL_VARIABLE),
    },
    router_redis_url={
        "section": "redis",
        "envvar": ROUTER_REDIS_URL_VARIABLE,
        "is_secret": True,
        "callback": checked_redis_url(ROUTER_REDIS_URL_VARIABLE),
    },
)
"""Adds an option for each described field of UpOptions. The two Redis URLs have variables of their own."""
_REVISION = setting(
    "cluster",
    "--revision",
    group="Model",
    metavar="REVISION",
    help="A branch, tag or commit of a hub model. Default: its main branch.",
)
_OF_ROUTERS = (
    field_setting(RouterConfig, "model_names", "cluster", group="Model", metavar=None),
    field_setting(RouterConfig, "generation_config", "cluster", group="Model"),
    field_setting(RouterConfig, "cors_origins", "cluster", group="Addresses"),
    field_setting(RouterConfig, "metrics_names", "cluster"),
)
_OF_LOGS = (
    setting(
        "logs",
        "--log-level",
        type=click.Choice(get_args(LogLevel)),
        default="info",
        show_default=True,
        envvar=LEVEL_VARIABLE,
        help="Least level of the log lines of routers and workers.",
    ),
    setting(
        "logs",
        "--log-format",
        type=click.Choice(get_args(LogFormat)),
        default="text",
        show_default=True,
        envvar=FORMAT_VARIABLE,
        help="`json` writes one object a line, with the request's id.",
    ),
)
_GROUPS = (
    config_option,
    cluster_option,
    engine_options,
    _REVISION,
    _OF_THE_CLUSTER,
    *_OF_ROUTERS,
    placement_options,
    limit_options,
    security_options,
    *_OF_LOGS,
)


def up_settings(command: Command) -> Command:
    """Add all settings of `up`; `up_options` makes UpOptions of their values."""
    for add in reversed(_GROUPS):
        command = add(command)
    return command


def up_options(values: dict[str, Any], *, default_ports: Mapping[str, int | None] = UP_PORTS) -> UpOptions:
    """Remove all settings from a command's arguments, and return them. Raise UsageError for a bad value.

    A port that the user did not give gets its default, and may move to the next free one.
    """
    with wrong_values_are_usage():
        return _up_options(values, default_ports)


def _up_options(values: dict[str, Any], default_ports: Mapping[str, int | None]) -> UpOptions:
    if values["model_names"] and values["further_models"]:
        raise ValueError("--model-name is for one model, and this cluster begins with several")
    if values["address"] is not None:
        values["address"] = ray_address(values["address"])
    model_names = values.pop("model_names") or served_names(values["model"])
    movable_ports = frozenset(name for name in default_ports if values[name] is None)
    values |= {name: default_ports[name] for name in movable_ports}
    context = click.get_current_context(silent=True)
    return UpOptions(
        written={} if context is None else written_settings(context),
        additions=additions_of({} if context is None else context.meta.get(ADDITIONS_KEY, {})),
        engine=engine_config(values),
        model_names=model_names,
        movable_ports=movable_ports,
        limits=taken(RouterLimits, values),
        worker_limits=taken(WorkerLimits, values),
        security=security(values),
        log=LogConfig(level=values.pop("log_level"), format=values.pop("log_format")),
        **values,
    )
