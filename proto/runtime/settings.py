"""Settings as fields of a dataclass, each with its help text, bounds and flag beside its default.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        model: str = field(metadata=described("Model folder."))
        max_num_seqs: int = setting(256, help="Sequences that run at once.", minimum=1)

        def __post_init__(self) -> None:
            check_settings(self)

Owns what follows from the fields: options of argparse, the values of parsed options, and the check of bounds. The
options of `blockyard up` and docs/cli.md follow from them too (deploy/settings/setting.py). Pure.
"""

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Value = TypeVar("Value")
Group = Literal[
    "Model",
    "Cluster",
    "Addresses",
    "Existing Ray cluster",
    "Memory of each worker",
    "Steps of each worker",
    "Placement",
    "Limits",
    "Failures",
    "Security",
    "Prefix index",
    "Logs",
    "Options",
    "For tests",
]
"""Headings under which help and docs/cli.md list options, in this order."""
_DESCRIPTION = "blockyard.setting"
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Help text, bounds and options of a setting; its field has name, type and default."""

    help: str
    flag: str | None = None
    """None means the field's name with hyphens."""
    group: Group | None = None
    metavar: str | None = None
    minimum: float | None = None
    above: float | None = None
    """The value must be greater than this."""
    maximum: float | None = None
    below: float | None = None
    """The value must be less than this; `math.inf` makes it finite."""
    parse: Callable[[Any], Any] | None = None
    """Turns the option's text, or the list of its texts, into the value. Raises ValueError."""
    is_repeated: bool = False
    """The option may be given more than once."""

    def allows(self, value: float) -> bool:
        """Return whether a number is within the bounds. NaN is within none."""
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    @property
    def rule(self) -> str:
        """The bounds in words, such as "must be at least 1"."""
        if self.minimum is not None and self.maximum is not None:
            return f"must be from {self.minimum:g} to {self.maximum:g}"
        has_end = self.maximum is not None or self.below not in (None, math.inf)
        parts = ["finite"] if self.below == math.inf else []
        if self.minimum is not None:
            parts.append(
                "not negative" if self.minimum == 0 and not has_end else f"at least {self.minimum:g}"
            )
        if self.above is not None:
            parts.append(f"above {self.above:g}")
        if self.maximum is not None:
            parts.append(f"at most {self.maximum:g}")
        elif has_end:
            parts.append(f"below {self.below:g}")
        return "must not be negative" if parts == ["not negative"] else f"must be {' and '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """A field of a settings class that has a Description."""

    name: str
    kind: type
    """bool, int, float or str: the type of the option's value before `parse`."""
    choices: tuple[Any, ...]
    """Values of a Literal; empty for other types."""
    default: Any
    """MISSING if the setting is required or its default is made by a factory."""
    description: Description
    is_required: bool

    @property
    def flag(self) -> str:
        return self.description.flag or "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.default is False

    def check(self, value: Any, called: str) -> None:
        """Raise ValueError for a value that is no choice or out of bounds. `called` is the setting's name in the error.
        None always passes."""
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise ValueError(f"{called} must be one of {', '.join(map(str, self.choices))}, not {value}")
        if isinstance(value, int | float) and not self.description.allows(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ValueError(f"{called} {self.description.rule}, not {shown}")


def described(help: str, **details: Any) -> dict[str, Description]:
    """Return the metadata of a dataclass field. `details` are the fields of Description."""
    return {_DESCRIPTION: Description(help=help, **details)}


def setting(default: Value, *, help: str, **details: Any) -> Value:
    """Return a dataclass field with a default and its description. `details` are the fields of Description."""
    made: Value = field(default=default, metadata=described(help, **details))
    return made


@cache
def setting_fields(owner: Any) -> tuple[SettingField, ...]:
    """List the described fields of a settings class, in their order. Fields without a description are left out."""
    hints = get_type_hints(owner)
    found = []
    for member in fields(owner):
        description = member.metadata.get(_DESCRIPTION)
        if description is not None:
            kind, choices = _kind_and_choices(hints[member.name])
            found.append(
                SettingField(
                    name=member.name,
                    kind=kind,
                    choices=choices,
                    default=member.default,
                    description=description,
                    is_required=member.default is MISSING and member.default_factory is MISSING,
                )
            )
    return tuple(found)


def setting_field(owner: Any, name: str) -> SettingField:
    """Return one described field of a settings class."""
    return next(member for member in setting_fields(owner) if member.name == name)


def check_settings(config: Any, prefix: str = "") -> None:
    """Raise ValueError for the first described field with a bad value. `prefix` precedes the field's name in the
    error."""
    owner: Any = type(config)
    for member in setting_fields(owner):
        member.check(getattr(config, member.name), prefix + member.name)


def add_arguments(parser: argparse.ArgumentParser, owner: Any) -> None:
    """Add an option to the parser for each described field. `given` returns the parsed values."""
    for member in setting_fields(owner):
        description = member.description
        attributes: dict[str, Any] = {"dest": member.name, "help": _escaped(description.help)}
        if member.is_switch:
            parser.add_argument(member.flag, action="store_true", **attributes)
            continue
        attributes["metavar"] = description.metavar
        if description.is_repeated:
            parser.add_argument(member.flag, action="extend", nargs="+", default=[], **attributes)
            continue
        if member.default not in (MISSING, None, ""):
            attributes["help"] += " Default: %(default)s."
        parser.add_argument(
            member.flag,
            type=_argument(description.parse) if description.parse else member.kind,
            required=member.is_required,
            default=None if member.default is MISSING else member.default,
            choices=member.choices or None,
            **attributes,
        )


def given(owner: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the described fields out of parsed options. Raises ValueError, which names the flag, for a
    bad value."""
    values = {}
    for member in setting_fields(owner):
        value = getattr(arguments, member.name)
        if member.description.is_repeated:
            value = (member.description.parse or tuple)(value)
        member.check(value, member.flag)
        values[member.name] = value
    return values


def parse_bytes(text: str) -> int:
    """Return the bytes of a size: `60GB` is decimal, `60GiB` binary, `60` bytes. Raises ValueError for any other
    text."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a size is a number with B, KB, MB, GB, KiB, MiB or GiB, not {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _kind_and_choices(hint: Any) -> tuple[type, tuple[Any, ...]]:
    """Return the type of an option's value, and the values of a Literal. The None of a union is left out."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return type(choices[0]), choices
    return (hint if hint in (bool, int, float, str) else str), ()


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `parse` as a type for argparse, so that its error shows the message of `parse` and not the function's
    name."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _escaped(help: str) -> str:
    """Return a help text for argparse, which formats it with `%`."""
    return help.replace("%", "%%")
