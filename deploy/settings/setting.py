"""Setting: an option of the command line that the environment and the configuration file may give too.

Owns the names of settings. `setting("limits", "--max-requests")` is `max_requests` under `[limits]` of the file, and
BLOCKYARD_UP_MAX_REQUESTS in the environment unless it has a variable of its own. Most settings follow from the fields
of a settings class (`field_settings`, proto/runtime/settings.py). Options of another class than Setting are of the
command line alone. Click takes the flag first, then the environment, the file, the default. Reads no file
(config_file.py).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import click
from blockyard.proto.index.shards import split_urls
from blockyard.proto.runtime.settings import Group, SettingField, setting_field, setting_fields

VARIABLE_PREFIX = "BLOCKYARD_UP_"
OTHERS = "Options"
"""Group of the options that have no other."""
TESTS = "For tests"
"""Group of the options that `--help` does not show."""
GROUPS: tuple[str, ...] = get_args(Group)
"""Groups of options, in the order of help and docs/cli.md."""
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
Owner = TypeVar("Owner")
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
"""Query options of a Redis URL that are no secret."""
_URL = re.compile(r"([\w+]+://)(?:([^:@/?#]*)(:[^@]*)?@)?([^@?#]*)(\?.*)?")
_KINDS = {"integer": "a whole number", "float": "a number", "boolean": "true or false"}


class Setting(click.Option):
    """Option of click with a section and a key in the configuration file.

    `pairs_of`: settings class whose fields are the names of NAME=VALUE; None if any name is allowed. `group`: one of
    GROUPS; None takes the section's group. `is_secret`: the value is a URL that is shown without its password.
    """

    def __init__(
        self,
        *arguments: Any,
        section: str,
        key: str | None = None,
        is_secret: bool = False,
        pairs_of: Any = None,
        group: Group | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(*arguments, **attributes)
        self.section = section
        self.group = group or _GROUP_OF_SECTION.get(section, OTHERS)
        self.key = key or max(self.opts, key=len).removeprefix("--").replace("-", "_")
        self.is_secret = is_secret
        self.pairs: tuple[SettingField, ...] | None = None if pairs_of is None else setting_fields(pairs_of)
        if self.envvar is None:
            self.envvar = VARIABLE_PREFIX + self.key.upper()

    @property
    def pair_names(self) -> tuple[str, ...] | None:
        """Names that NAME=VALUE may have. None: any."""
        return None if self.pairs is None else tuple(pair.name for pair in self.pairs)

    @property
    def place(self) -> tuple[str, str]:
        """Section and key in a configuration file."""
        return self.section, self.key

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the environment variables that give the setting."""
        if self.envvar is None:
            return ()
        return (self.envvar,) if isinstance(self.envvar, str) else tuple(self.envvar)

    @property
    def takes_pairs(self) -> bool:
        """Whether the setting is a table in a file and NAME=VALUE on the command line."""
        return self.multiple and self.metavar is not None and "=" in self.metavar

    @property
    def kind(self) -> str:
        """Type of the setting's value in words, such as `a whole number`."""
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
    """Yield GROUPS with their options. Groups without options are left out."""
    options = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
    for group in GROUPS:
        members = [option for option in options if getattr(option, "group", OTHERS) == group]
        if members:
            yield group, members


def setting(section: str, *flags: str, **attributes: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds a click option, which the environment and a configuration file may set too."""
    return click.option(*flags, cls=Setting, section=section, **attributes)


@contextmanager
def wrong_values_are_usage() -> Iterator[None]:
    """Turn a ValueError inside the `with` block into click's UsageError, which ends with exit code 2."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def checked_by(check: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a click callback that returns `check(value)`, or None for None. A ValueError becomes BadParameter."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else check(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def is_template(value: str) -> bool:
    """Tell whether a value is the text of a Jinja template, and not the name of its file."""
    return "{%" in value or "{{" in value


def settings_of(command: click.Command) -> list[Setting]:
    return [parameter for parameter in command.params if isinstance(parameter, Setting)]


def masked(urls: str | None) -> str | None:
    """Return a URL, or several with commas between, with *** in place of each password.

    A password may stand before the host or in the query. Query options are shown only if OPEN_OPTIONS has them. A text
    that is no URL is hidden as a whole.
    """
    return None if urls is None else ",".join(map(_masked, split_urls(urls)))


def _masked(url: str) -> str:
    parts = _URL.fullmatch(url)
    if parts is None:
        return HIDDEN
    scheme, user, password, rest, query = (part or "" for part in parts.groups())
    who = user + (f":{HIDDEN}" if password else "") + "@" if user or password else ""
    options = (
        option if option.partition("=")[0] in OPEN_OPTIONS else HIDDEN for option in query[1:].split("&")
    )
    return scheme + who + rest + (f"?{'&'.join(options)}" if query else "")


def field_settings(owner: Any, section: str, **special: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Return a decorator that adds an option for each described field of a settings class.

    `taken` makes the class of their values. `special` has further attributes of single options, by field. A `section`
    among them replaces the common one.
    """

    def add_all(command: Command) -> Command:
        for member in reversed(setting_fields(owner)):
            attributes = {"section": section, **special.get(member.name, {})}
            command = field_setting(owner, member.name, **attributes)(command)
        return command

    return add_all


def field_setting(owner: Any, name: str, section: str, **special: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds the option of one field, whose description has flag, type, default and help."""
    member = setting_field(owner, name)
    return click.option(
        member.flag, name, cls=Setting, **{"section": section, **_attributes(member), **special}
    )


def own_option(owner: Any, name: str, **special: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds the option of one field to a command whose default is the cluster's setting.

    It is None if it is not given. No variable or file gives it. A value out of bounds is a BadParameter. `special` has
    further attributes of the option, and `parse` in place of the field's own.
    """
    member = setting_field(owner, name)
    parse = special.pop("parse", member.description.parse)

    def check(value: Any) -> Any:
        parsed = value if parse is None else parse(value)
        member.check(parsed, "the value")
        return parsed

    of_field = _attributes(member)
    attributes = {
        "type": of_field.get("type"),
        "metavar": of_field["metavar"],
        "help": "As in `up`. Default: the cluster's.",
        "callback": checked_by(check),
    }
    return click.option(member.flag, name, **{**attributes, **special})


def taken(owner: type[Owner], values: dict[str, Any]) -> Owner:
    """Remove the fields of a settings class from a command's arguments, and return the class made of them.

    Raise what the class raises.
    """
    settings_class: Any = owner
    return owner(**{member.name: values.pop(member.name) for member in setting_fields(settings_class)})


def _attributes(member: SettingField) -> dict[str, Any]:
    """Return the attributes of a field's click option.

    Only text fields become a click.Choice. The settings class itself checks other values.
    """
    description = member.description
    attributes: dict[str, Any] = {
        "help": description.help,
        "group": description.group,
        "hidden": description.group == TESTS,
        "metavar": description.metavar,
    }
    if description.parse is not None:
        attributes["callback"] = checked_by(description.parse)
    if description.is_repeated:
        return attributes | {"multiple": True}
    if member.is_switch:
        return attributes | {"is_flag": True, "default": False}
    if description.parse is not None:
        attributes["type"] = str
    elif member.kind is str and member.choices:
        attributes["type"] = click.Choice(member.choices)
    else:
        attributes["type"] = member.kind
    if member.is_required or member.default is None:
        return attributes | {"default": None}
    return attributes | {"default": member.default, "show_default": True}
