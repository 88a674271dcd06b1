"""`blockyard config show`, `config example` and `export`: settings, and configuration files to start from."""

from typing import TYPE_CHECKING, Any

import click
from blockyard.deploy.commands.printing import known_cluster, show
from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.settings import effective
from blockyard.deploy.settings.config_file import known_settings
from blockyard.deploy.settings.exported import AddedAdapter, as_config
from blockyard.deploy.settings.options import cluster_option, found_option, output_option
from blockyard.deploy.settings.security import client_connection, connection_options
from blockyard.deploy.settings.setting import GroupedCommand, wrong_values_are_usage
from blockyard.deploy.settings.up_options import up_settings
from blockyard.router.client import BlockyardError, Client

if TYPE_CHECKING:
    from blockyard.deploy.supervision.desired_state import DesiredState

LOOK_SECONDS = 3.0
"""Deadline of each call of a router."""


@click.command()
@cluster_option
@found_option
@connection_options
def export(cluster: str, address: str | None) -> None:
    """Print a running cluster as a configuration file, for `up --config FILE` to start the same cluster again.

    It has the settings of `up`, and the models, adapters and numbers of workers of now. Passwords are left out."""
    desired = on_ray.desired_state(known_cluster(cluster, address))
    with wrong_values_are_usage():
        connection = client_connection()
    try:
        adapters: list[AddedAdapter] | None = _adapters(desired, connection)
    except (BlockyardError, ValueError) as error:
        adapters = None
        click.echo(f"warning: the LoRA adapters are left out: {error}", err=True)
    click.echo(as_config(desired, adapters), nl=False)


def _adapters(desired: "DesiredState", connection: dict[str, Any]) -> list[AddedAdapter]:
    """Return the adapters of all models. Raise BlockyardError if no router names them."""
    routers = list(dict.fromkeys(router for _, router, _ in desired.addresses))
    models = [*([""] if desired.serves_first else []), *(plan.id for plan in desired.further_models)]
    with Client(routers, timeout_seconds=LOOK_SECONDS, retries=0, **connection) as client:
        return [
            AddedAdapter(name=one.name, path=one.path, tenant=one.tenant, model=model)
            for model in models
            for one in client.list_adapters(model=model or None)
        ]


@click.group()
def config() -> None:
    """Show the settings of `up`, and where each comes from."""


@config.command(name="show", cls=GroupedCommand)
@up_settings
@output_option
def show_config(output: str, **_: Any) -> None:
    """Show the settings that `up` would use with these flags, the environment and --config, each with its source.

    Passwords in URLs are masked."""
    context = click.get_current_context()
    settings = effective.effective(context)
    show(output, effective.as_document(settings, context), effective.effective_table(settings))


@config.command(name="example")
def example_config() -> None:
    """Print a commented configuration file with the default of every setting."""
    known = known_settings(click.get_current_context().find_root().command)
    click.echo(effective.example(known.values()), nl=False)
