"""The configuration file: TOML with a table for each section of settings, behind `--config` and BLOCKYARD_CONFIG.

Owns reading it, and what is refused by file, section and key: what no setting is called, a value of the wrong type, a
secret in clear. Does not own what settings there are (setting.py), nor who is heard before whom (click). Relative
paths are relative to the file.
"""

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from blockyard.deploy.settings.setting import VARIABLE_PREFIX, Command, Setting, masked, settings_of

CONFIG_VARIABLE = "BLOCKYARD_CONFIG"
FILE_KEY = "blockyard.config_file"
"""Where click's context keeps the path of what was read."""
Places = dict[tuple[str, str], Any]
"""Values by section and key."""


class ConfigError(click.UsageError):
    """What is wrong with a configuration, and where."""


def config_option(command: Command) -> Command:
    """Read before any other option is, so that they find their defaults in it."""
    add = click.option(
        "-c",
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar=CONFIG_VARIABLE,
        is_eager=True,
        expose_value=False,
        callback=_read_for,
        help="A file of settings (`blockyard config example`). Flags and environment are heard before it.",
    )
    return add(command)


def known_settings(root: click.Command) -> dict[tuple[str, str], Setting]:
    """Of every command below `root`, by section and key."""
    below = root.commands.values() if isinstance(root, click.Group) else ()
    found = {setting.place: setting for setting in settings_of(root)}
    for command in below:
        found |= known_settings(command)
    return found


def read_config(path: Path, known: Mapping[tuple[str, str], Setting], context: click.Context) -> Places:
    """Raises ConfigError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    sections = {section for section, _ in known}
    values: Places = {}
    for section, table in document.items():
        if section not in sections or not isinstance(table, dict):
            raise ConfigError(
                f"{path} has [{section}], which is none of the sections{_nearest(section, sections)}"
            )
        keys = {key for of, key in known if of == section}
        for key, value in table.items():
            if key not in keys:
                raise ConfigError(
                    f"{path} has {key} in [{section}], where nothing is called so{_nearest(key, keys)}"
                )
            values[section, key] = _value(path, known[section, key], value, context)
    return values


def check_environment(known: Iterable[Setting], environment: Mapping[str, str]) -> None:
    """A misspelt variable would do nothing, without a word. Raises ConfigError."""
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
    """Variables that set another command's options, or none: to tell which of them, all commands are imported."""
    own = {variable for setting in settings_of(command) for variable in setting.variables}
    return {variable for variable in environment if variable.startswith(VARIABLE_PREFIX)} - own


def _nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name.replace("-", "_"), sorted(names), n=1)
    return f": did you mean {found[0]}?" if found else f": there is {', '.join(sorted(names))}"


def _value(path: Path, setting: Setting, value: Any, context: click.Context) -> Any:
    where = f"{path}: {setting.key} in [{setting.section}]"
    if setting.takes_pairs:
        value = _pairs(where, setting, value)
    elif not _fits(setting, value):
        raise ConfigError(f"{where} must be {setting.kind}, not {_shown(setting, value)}")
    if setting.is_secret and masked(value) != value:
        variable = setting.variables[0]
        raise ConfigError(
            f"{where} holds a password, or what may be one, which does not belong in this file: set {variable} instead"
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
    return "what it is" if setting.is_secret else repr(value)


def _absolute(path: Path, setting: Setting, value: Any) -> Any:
    """What names a file does so from the configuration's own folder."""
    if not isinstance(value, str):
        return str(value) if setting.metavar == "SIZE" else value
    beside = path.resolve().parent / Path(value).expanduser()
    is_folder = setting.key == "model" and value != "demo" and beside.is_dir()
    return str(beside) if isinstance(setting.type, click.Path) or is_folder else value
