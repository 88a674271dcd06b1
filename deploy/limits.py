"""What a cluster's routers admit and bear, as a value and as options of `up`.

Does not own what the limits mean (router/config.py, router/admission.py, router/tenants.py).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import click
from blockyard.deploy.options import Command
from blockyard.router.config import (
    DEFAULT_LOST_SECONDS,
    DEFAULT_MAX_MIGRATIONS,
    DEFAULT_MAX_QUEUE_SECONDS,
    DEFAULT_MAX_REQUESTS,
    DEFAULT_MAX_TOKENS_ADMITTED,
    DEFAULT_STALL_SECONDS,
    DEFAULT_SUSPECT_SECONDS,
    check_limits,
    check_patience,
)
from blockyard.router.tenants import parse_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """Of each router. The names are RouterConfig's. Raises ValueError for bad values."""

    max_requests: int = DEFAULT_MAX_REQUESTS
    max_tokens_admitted: int = DEFAULT_MAX_TOKENS_ADMITTED
    max_queue_seconds: float = DEFAULT_MAX_QUEUE_SECONDS
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    suspect_seconds: float = DEFAULT_SUSPECT_SECONDS
    lost_seconds: float = DEFAULT_LOST_SECONDS
    stall_seconds: float = DEFAULT_STALL_SECONDS
    max_migrations: int = DEFAULT_MAX_MIGRATIONS

    def __post_init__(self) -> None:
        check_limits(
            max_requests=self.max_requests,
            max_tokens_admitted=self.max_tokens_admitted,
            max_queue_seconds=self.max_queue_seconds,
            tenant_weights=self.tenant_weights,
        )
        check_patience(
            suspect_seconds=self.suspect_seconds,
            lost_seconds=self.lost_seconds,
            stall_seconds=self.stall_seconds,
            max_migrations=self.max_migrations,
        )

    def as_settings(self) -> dict[str, Any]:
        """For RouterConfig."""
        return asdict(self)


def limit_options(command: Command) -> Command:
    """Adds an option for each limit; `router_limits` takes them back."""
    for add in (
        click.option(
            "--stall-seconds",
            type=float,
            default=DEFAULT_STALL_SECONDS,
            show_default=True,
            help="A worker that answers but has finished no step for so long is given up: more than the model's "
            "longest step.",
        ),
        click.option(
            "--lost-seconds",
            type=float,
            default=DEFAULT_LOST_SECONDS,
            show_default=True,
            help="A worker that is silent for so long is given up, and its requests go on elsewhere.",
        ),
        click.option(
            "--suspect-seconds",
            type=float,
            default=DEFAULT_SUSPECT_SECONDS,
            show_default=True,
            help="A worker that is silent for so long gets nothing new.",
        ),
        click.option(
            "--max-migrations",
            type=int,
            default=DEFAULT_MAX_MIGRATIONS,
            show_default=True,
            help="Workers that a request may lose and still go on elsewhere; 0 switches replay off.",
        ),
        click.option(
            "--tenant-weight",
            "tenant_weights",
            multiple=True,
            callback=_tenant_weights,
            metavar="NAME=WEIGHT",
            help="A tenant's share of the waiting line and of the limits beside the others', who have 1; without a "
            "NAME that of all calls that name no tenant. May be given more than once.",
        ),
        click.option(
            "--max-queue-seconds",
            type=float,
            default=DEFAULT_MAX_QUEUE_SECONDS,
            show_default=True,
            help="A request that found no worker for so long is refused.",
        ),
        click.option(
            "--max-tokens-admitted",
            type=int,
            default=DEFAULT_MAX_TOKENS_ADMITTED,
            show_default=True,
            help="The most prompt tokens that each router holds at once; a prompt above it is let in only alone.",
        ),
        click.option(
            "--max-requests",
            type=int,
            default=DEFAULT_MAX_REQUESTS,
            show_default=True,
            help="The most requests that each router holds at once, waiting and running; more are refused.",
        ),
    ):
        command = add(command)
    return command


def router_limits(values: dict[str, Any]) -> RouterLimits:
    """Takes the limits out of a command's arguments. Raises ValueError."""
    return RouterLimits(**{setting.name: values.pop(setting.name) for setting in fields(RouterLimits)})


def _tenant_weights(
    context: click.Context, option: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, float]:
    try:
        return parse_weights(pairs)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
