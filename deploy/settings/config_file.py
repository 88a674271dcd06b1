"""Configuration file: TOML with a table for each section of settings, named by `--config` or BLOCKYARD_CONFIG.

Owns reading it. Refuses unknown keys, values of a wrong type and secrets, and names file, section and key. Does not own
the settings (setting.py) nor the order in which flag, variable and file apply (click). Relative paths are relative to
the file's folder.
"""

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from blockyard.deploy.settings.setting import (
    VARIABLE_PREFIX,
    Command,
    Setting,
    is_template,
    masked,
    settings_of,
)

CONFIG_VARIABLE = "BLOCKYARD_CONFIG"
FILE_KEY = "blockyard.config_file"
"""Key in click's context for the path of the configuration file."""
ADDITIONS_KEY = "blockyard.additions"
"""Key in click's context for the file's tables that are no settings."""
ADDITIONS = frozenset(("models", "adapters"))
"""Names of those tables. They are for `up` and `serve` alone (exported.py)."""
Places = dict[tuple[str, str], Any]
"""Values of settings, by section and key."""


class ConfigError(click.UsageError):
    """A mistake in a configuration, with its place."""


def config_option(command: Command) -> Command:
    """Add `--config`. Its file is read before the other options, which take their defaults from it."""
    add = click.option(
        "-c",
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar=CONFIG_VARIABLE,
        is_eager=True,
        expose_value=False,
        callback=_read_for,
        help="File of settings (`blockyard config example`). Flags and variables take precedence over it.",
    )
    return add(command)


def known_settings(root: click.Command) -> dict[tuple[str, str], Setting]:
    """Return the settings of `root` and of every command below it, by section and key."""
    below = root.commands.values() if isinstance(root, click.Group) else ()
    found = {setting.place: setting for setting in settings_of(root)}
    for command in below:
        found |= known_settings(command)
    return found


def read_config(path: Path, known: Mapping[tuple[str, str], Setting], context: click.Context) -> Places:
    """Return the values in a file. Raise ConfigError if it is unreadable, or for an unknown key or a wrong value."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    context.meta[ADDITIONS_KEY] = {name: document.pop(name) for name in ADDITIONS if name in document}
    sections = {section for section, _ in known}
    values: Places = {}
    for section, table in document.items():
        if section not in sections or not isinstance(table, dict):
            raise ConfigError(f"{path} has [{section}], which is not a section{_nearest(section, sections)}")
        keys = {key for of, key in known if of == section}
        for key, value in table.items():
            if key not in keys:
                raise ConfigError(
                    f"{path} has {key} in [{section}], which is no setting there{_nearest(key, keys)}"
                )
            values[section, key] = _value(path, known[section, key], value, context)
    return values


def check_environment(known: Iterable[Setting], environment: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable BLOCKYARD_UP_* that sets nothing: a misspelt one would be ignored silently."""
    variables = {variable for setting in known for variable in setting.variables}
    for variable in environment:
        if variable.startswith(VARIABLE_PREFIX) and variable not in variables:
            raise ConfigError(
                f"the environment has {variable}, which sets nothing{_nearest(variable, variables)}"
            )


def _read_for(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    if path is None and not _others_settings(context.command, os.environ):
        return
    known = known_settings(context.find_root().command)
    check_environment(known.values(), os.environ)
    if path is None:
        return
    values = read_config(path, known, context)
    context.meta[FILE_KEY] = str(path)
    context.default_map = {
        setting.name: values[setting.place]
        for setting in settings_of(context.command)
        if setting.place in values and setting.name is not None
    }


def _others_settings(command: click.Command, environment: Mapping[str, str]) -> set[str]:
    """Return the variables BLOCKYARD_UP_* that set nothing of this command. They belong to another command or to none.

    Telling these two cases apart needs the import of all commands.
    """
    own = {variable for setting in settings_of(command) for variable in setting.variables}
    return {variable for variable in environment if variable.startswith(VARIABLE_PREFIX)} - own


def _nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name.replace("-", "_"), sorted(names), n=1)
    return f": did you mean {found[0]}?" if found else f": choose from {', '.join(sorted(names))}"


def _value(path: Path, setting: Setting, value: Any, context: click.Context) -> Any:
    where = f"{path}: {setting.key} in [{setting.section}]"
    if setting.takes_pairs:
        value = _pairs(where, setting, value)
    elif not _fits(setting, value):
        raise ConfigError(f"{where} must be {setting.kind}, not {_shown(setting, value)}")
    if setting.is_secret and masked(value) != value:
        variable = setting.variables[0]
        raise ConfigError(
            f"{where} holds a password, or a text that may be one. Passwords do not belong in this file: set {variable}"
        )
    value = _absolute(path, setting, value)
    try:
        checked = setting.type_cast_value(context, value)
        if setting.callback is not None and setting.expose_value:
            setting.callback(context, setting, checked)
    except click.BadParameter as error:
        raise ConfigError(f"{where}: {error.message}") from None
    return value


def _pairs(where: str, setting: Setting, table: Any) -> list[str]:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be {setting.kind}, not {table!r}")
    for name, value in table.items():
        if setting.pair_names is not None and name not in setting.pair_names:
            raise ConfigError(f"{where} has {name}, which is no setting{_nearest(name, setting.pair_names)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: {name} must be a number, not {value!r}")
    return [f"{name}={value}" for name, value in table.items()]


def _fits(setting: Setting, value: Any) -> bool:
    if setting.multiple:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(value, bool) or isinstance(setting.type, click.types.BoolParamType):
        return isinstance(value, bool) and isinstance(setting.type, click.types.BoolParamType)
    if isinstance(setting.type, click.types.IntParamType):
        return isinstance(value, int)
    if isinstance(setting.type, click.types.FloatParamType):
        return isinstance(value, int | float)
    return isinstance(value, str) or (setting.metavar == "SIZE" and isinstance(value, int))


def _shown(setting: Setting, value: Any) -> str:
    return "this value" if setting.is_secret else repr(value)


def _absolute(path: Path, setting: Setting, value: Any) -> Any:
    """Return a path or a model's folder as an absolute path, resolved against the configuration file's folder.

    A SIZE that is a number becomes text. Other values stay as they are.
    """
    if not isinstance(value, str) or is_template(value):
        return str(value) if setting.metavar == "SIZE" else value
    beside = path.resolve().parent / Path(value).expanduser()
    is_folder = setting.key == "model" and value != "demo" and beside.is_dir()
    return str(beside) if isinstance(setting.type, click.Path) or is_folder else value
