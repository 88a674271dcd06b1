"""`blockyard config show` and `config example`: the settings in effect, and a configuration file to start from."""

from typing import Any

import click
from blockyard.deploy.commands.printing import show
from blockyard.deploy.settings import effective
from blockyard.deploy.settings.config_file import known_settings
from blockyard.deploy.settings.options import output_option
from blockyard.deploy.settings.setting import GroupedCommand
from blockyard.deploy.settings.up_options import up_settings


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
