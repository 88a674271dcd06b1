"""What a setting is: an option of the command line that the environment and the configuration file may give too.

Owns names, and the groups in which help and docs/cli.md list options. `setting("limits", "--max-requests")` is
`max_requests` under `[limits]` of the file, and in the environment BLOCKYARD_UP_MAX_REQUESTS unless it has a variable
of its own. What is not made by `setting` can be given on the command line alone. Click decides who is heard: flag, then
environment, then file, then default. Reads no file (config_file.py).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import click

VARIABLE_PREFIX = "BLOCKYARD_UP_"
OTHERS = "Options"
"""The group of options that name none."""
TESTS = "For tests"
"""The group of options that help hides."""
GROUPS = (
    *(
        "Model",
        "Cluster",
        "Addresses",
        "Existing Ray cluster",
        "Memory of each worker",
        "Steps of each worker",
    ),
    *("Placement", "Limits", "Failures", "Security", "Prefix index", "Logs", OTHERS, TESTS),
)
"""The groups of options, in the order of help and docs/cli.md."""
_GROUP_OF_SECTION = {
    "cluster": "Cluster",
    "worker": "Limits",
    "placement": "Placement",
    "limits": "Limits",
    "security": "Security",
    "redis": "Prefix index",
    "logs": "Logs",
}
Command = TypeVar("Command", bound=Callable[..., Any])
HIDDEN = "***"
OPEN_OPTIONS = frozenset(
    (
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_cert_reqs",
        "ssl_check_hostname",
        "db",
    )
)
"""Of a Redis URL: those that are no secret."""
_URL = re.compile(r"(\w+://)(?:([^:@/?#]*)(:[^@]*)?@)?([^@?#]*)(\?.*)?")
_KINDS = {"integer": "a whole number", "float": "a number", "boolean": "true or false"}


class Setting(click.Option):
    """`pair_names`: of one that takes NAME=VALUE, the names there are; None where any may be. `group`: one of GROUPS;
    without it the section's."""

    def __init__(
        self,
        *arguments: Any,
        section: str,
        key: str | None = None,
        is_secret: bool = False,
        pair_names: Iterable[str] | None = None,
        group: str | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(*arguments, **attributes)
        self.section = section
        self.group = group or _GROUP_OF_SECTION.get(section, OTHERS)
        self.key = key or max(self.opts, key=len).removeprefix("--").replace("-", "_")
        self.is_secret = is_secret
        self.pair_names = None if pair_names is None else tuple(pair_names)
        if self.envvar is None:
            self.envvar = VARIABLE_PREFIX + self.key.upper()

    @property
    def place(self) -> tuple[str, str]:
        """Section and key in a configuration file."""
        return self.section, self.key

    @property
    def variables(self) -> tuple[str, ...]:
        """Of the environment."""
        if self.envvar is None:
            return ()
        return (self.envvar,) if isinstance(self.envvar, str) else tuple(self.envvar)

    @property
    def takes_pairs(self) -> bool:
        """In a file a table, on the command line NAME=VALUE."""
        return self.multiple and self.metavar is not None and "=" in self.metavar

    @property
    def kind(self) -> str:
        """What its value must be, in words."""
        if self.takes_pairs:
            return "a table of numbers"
        if isinstance(self.type, click.Choice):
            return "one of " + ", ".join(str(choice) for choice in self.type.choices)
        if self.metavar == "SIZE":
            return "a size, such as 2GiB"
        name = self.type.name.removesuffix(" range")
        return ("a list, each " if self.multiple else "") + _KINDS.get(name, "text")


class GroupedCommand(click.Command):
    """A command whose help lists the options in their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, options in grouped(self.get_params(ctx)):
            records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def grouped(parameters: Iterable[click.Parameter]) -> Iterator[tuple[str, list[click.Option]]]:
    """Sorts options into GROUPS. Leaves out groups without any."""
    options = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
    for group in GROUPS:
        members = [option for option in options if getattr(option, "group", OTHERS) == group]
        if members:
            yield group, members


def setting(section: str, *flags: str, **attributes: Any) -> Callable[[Command], Command]:
    """As click.option, for one that may stand in a configuration file."""
    return click.option(*flags, cls=Setting, section=section, **attributes)


@contextmanager
def wrong_values_are_usage() -> Iterator[None]:
    """Inside, what a value is refused for is a mistake of the command line, whose exit code is 2."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def checked_by(check: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback: what is given, as `check` returns it, and a bad parameter where that raises ValueError."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else check(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def settings_of(command: click.Command) -> list[Setting]:
    return [parameter for parameter in command.params if isinstance(parameter, Setting)]


def masked(url: str | None) -> str | None:
    """A URL without its password, which may stand before the host or in the query, whose other options are known by
    their names; nothing of what is no URL."""
    if url is None:
        return None
    parts = _URL.fullmatch(url)
    if parts is None:
        return HIDDEN
    scheme, user, password, rest, query = (part or "" for part in parts.groups())
    who = user + (f":{HIDDEN}" if password else "") + "@" if user or password else ""
    options = (
        option if option.partition("=")[0] in OPEN_OPTIONS else HIDDEN for option in query[1:].split("&")
    )
    return scheme + who + rest + (f"?{'&'.join(options)}" if query else "")


def field_settings(
    owner: Any, section: str, told: Mapping[str, str], **special: Mapping[str, Any]
) -> Callable[[Command], Command]:
    """A setting for each field of a dataclass, with its name, type, default and help; `special` has what else one
    needs, by field. `taken` takes them back."""
    hints = get_type_hints(owner)

    def add_all(command: Command) -> Command:
        for field in reversed(fields(owner)):
            attributes = {**_attributes(hints[field.name], field.default), **special.get(field.name, {})}
            flag = attributes.pop("flag", "--" + field.name.replace("_", "-"))
            add = setting(section, flag, field.name, help=told.get(field.name), **attributes)
            command = add(command)
        return command

    return add_all


def taken(owner: Any, values: dict[str, Any]) -> Any:
    """Takes a dataclass's fields out of a command's arguments. Raises what the dataclass raises."""
    return owner(**{field.name: values.pop(field.name) for field in fields(owner)})


def _attributes(hint: Any, default: Any) -> dict[str, Any]:
    """Choices for a literal of texts, the type beside None where that is the default, else the default's own type; the
    dataclass checks the rest."""
    if default is MISSING:  # the field's own factory, or a value that somebody must give
        return {}
    if default is False:
        return {"is_flag": True, "default": False}
    choices = get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        return {"type": click.Choice(choices), "default": default, "show_default": True}
    if default is None:
        return {"type": next(choice for choice in choices if choice is not NoneType), "default": None}
    return {"type": type(default), "default": default, "show_default": True}
