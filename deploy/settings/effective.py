"""Effective configuration: each setting's value and its source; and an example file.

Shows no secrets. Takes the values that click has chosen, and reads no file (config_file.py).
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import groupby
from typing import Any

import click
from blockyard.deploy.settings.config_file import CONFIG_VARIABLE, FILE_KEY
from blockyard.deploy.settings.setting import Setting, masked, settings_of
from click.core import ParameterSource
from rich.table import Table

_SOURCES = {ParameterSource.COMMANDLINE: "flag", ParameterSource.DEFAULT_MAP: "file"}
_EXAMPLES = {
    "a whole number": "1",
    "a number": "1.0",
    "true or false": "true",
    "a size, such as 2GiB": '"2GiB"',
}
SECTIONS = {
    "cluster": "The cluster as a whole: its model, workers, routers and addresses.",
    "engine": "Every worker's engine: the model, its memory, its steps.",
    "worker": "Every worker, except its engine.",
    "placement": "How routers choose a worker.",
    "limits": "Limits and timeouts of routers.",
    "security": "Tokens and TLS of the cluster's ports. The files have the same path on every node.",
    "redis": "The prefix index. Set the variable for a URL with a password, which does not belong in this file.",
    "logs": "Logs of routers and workers.",
    "client": "How the other commands reach routers. A token comes from its file or from BLOCKYARD_TOKEN.",
}
"""Sections with their descriptions, in the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """One setting with its effective value."""

    section: str
    key: str
    value: Any
    """The value; secrets are masked."""
    source: str
    """Source of the value: flag, a variable's name, file, or default."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults by name, if the setting is a table. Otherwise empty."""


def effective(context: click.Context) -> list[Effective]:
    """Return every setting of the command that runs, with its value and the source of the value."""
    found = []
    for setting in sorted(settings_of(context.command), key=_order):
        assert setting.name is not None
        value = context.params[setting.name] if setting.expose_value else None
        found.append(
            Effective(
                section=setting.section,
                key=setting.key,
                value=plain(masked(value) if setting.is_secret else value),
                source=source_of(context, setting),
                defaults=table_defaults(context, setting),
            )
        )
    return found


def as_document(settings: Iterable[Effective], context: click.Context) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {}
    for setting in settings:
        shown = {"value": setting.value, "source": setting.source}
        sections.setdefault(setting.section, {})[setting.key] = shown
    return {"file": context.meta.get(FILE_KEY), "settings": sections}


def effective_table(settings: Iterable[Effective], *, changed_only: bool = False) -> Table:
    """Return a table to print, with a line for each setting. A setting that is itself a table has a line for each name.

    `changed_only` leaves out lines with a default value.
    """
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("setting", "value", "from"):
        table.add_column(heading, overflow="fold")
    for setting in settings:
        for name, value, source in _rows(setting):
            if source != "default" or not changed_only:
                table.add_row(name, value, source, style=None if source == "default" else "bold")
    return table


def _rows(setting: Effective) -> Iterator[tuple[str, str, str]]:
    name, value, source = f"{setting.section}.{setting.key}", setting.value, setting.source
    if isinstance(value, dict) and value:
        for key, part in value.items():
            is_default = key in setting.defaults and setting.defaults[key] == part
            yield f"{name}.{key}", _text(part), "default" if is_default else source
    else:
        yield name, "-" if value in (None, [], {}) else _text(value), source


def table_defaults(context: click.Context, setting: Setting) -> Mapping[str, Any]:
    """Return the defaults by name of a setting that is a table, and nothing for another one."""
    if not setting.takes_pairs or setting.callback is None:
        return {}
    defaults: Mapping[str, Any] = plain(setting.callback(context, setting, ()))
    return defaults


def example(settings: Iterable[Setting]) -> str:
    """Return a configuration file in which every setting is a comment with its default.

    A setting without a default shows an example value.
    """
    lines = [
        "# Settings of Blockyard with their defaults. Remove the # of a line to change it.",
        f"# Used by --config FILE or {CONFIG_VARIABLE}. Flags take precedence, then the environment, then this file.",
    ]
    for section, members in groupby(sorted(settings, key=_order), key=lambda setting: setting.section):
        lines += ["", f"# {SECTIONS[section]}", f"[{section}]"]
        for setting in members:
            lines += [f"# {line}" for line in _description(setting)]
            lines.append(_example_line(setting))
    return "\n".join(lines) + "\n"


def _description(setting: Setting) -> Iterator[str]:
    yield " ".join((setting.help or "").split())
    for pair in setting.pairs or ():
        yield f"- {pair.name} = {pair.default}: {pair.description.help}"


def _example_line(setting: Setting) -> str:
    if setting.takes_pairs:
        return f"#{setting.key} = {{}}"
    if setting.is_flag:
        return f"#{setting.key} = false"
    if isinstance(setting.default, str | int | float) and not setting.required:
        return f"#{setting.key} = {json.dumps(setting.default)}"
    return f"# {setting.key} = {_example_value(setting)}  # {setting.kind}; not set by default"


def _example_value(setting: Setting) -> str:
    if setting.multiple:
        return "[]"
    if isinstance(setting.type, click.Choice):
        return json.dumps(str(setting.type.choices[0]))
    return _EXAMPLES.get(setting.kind, '"..."')


def source_of(context: click.Context, setting: Setting) -> str:
    """Return the source of a setting's value: flag, a variable's name, file or default."""
    assert setting.name is not None
    source = context.get_parameter_source(setting.name)
    if source is ParameterSource.ENVIRONMENT:
        return next((name for name in setting.variables if os.environ.get(name)), "environment")
    return _SOURCES.get(source, "default") if source is not None else "default"


def plain(value: Any) -> Any:
    """Return a value as JSON and TOML have it."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _order(setting: Setting) -> int:
    return list(SECTIONS).index(setting.section)
