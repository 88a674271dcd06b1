"""Writes the reference part of docs/cli.md, from the commands themselves.

    python -m tools.cli_reference docs/cli.md            # writes
    python -m tools.cli_reference docs/cli.md --check    # fails where the file differs, and writes nothing

Owns the form of the reference. The text above MARKER in that file is written by hand and kept.
"""

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TypeGuard

import click
from blockyard.deploy.cli import main as root
from blockyard.deploy.settings.config_file import known_settings
from blockyard.deploy.settings.effective import SECTIONS
from blockyard.deploy.settings.setting import TESTS, GroupedCommand, Setting, grouped

MARKER = "<!-- From here on generated: python -m tools.cli_reference docs/cli.md -->"
SETTLED = ("blockyard config show", "blockyard serve")
"""Commands that have all settings of `up`."""
UP = "blockyard up"
OFTEN = "May be given more than once."
MANY = 4
"""Commands with one option, or options of the same commands, from which number on they are listed once."""
PREFIX = "BLOCKYARD_UP_"
SETTINGS_HEAD = f"""Each setting is a flag of `up`, a variable, and a key in a section of the file. Flags take
precedence, then variables, then the file. The variable is `{PREFIX}` and the key in capitals. The flag is the key with
hyphens, unless it stands behind the key here. The lists of [up](#blockyard-up) and of
[commands that reach a router](#reaching-a-router) say what each does."""
Named = tuple[str, click.Command]


def reference() -> str:
    """Return the reference: every command, the options that several commands have, and every setting."""
    common, lists = common_options()
    return "\n".join([MARKER, "", *_commands(common), *lists, *_reaching(), *_settings()]) + "\n"


def rewritten(document: str) -> str:
    """Return a document with its reference up to date. Raises ValueError if the marker is missing."""
    by_hand, marker, _ = document.partition(MARKER)
    if not marker:
        raise ValueError(f"the document has no line {MARKER}")
    return by_hand + reference()


def all_commands(group: click.Group = root, prefix: str = "blockyard") -> Iterator[Named]:
    """Yield every command that is not a group, with its full name."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _commands(common: Mapping[str, str]) -> Iterator[str]:
    yield from ("## Commands", "")
    for name, command in all_commands():
        yield from (f"### {name}", "")
        if arguments := command.collect_usage_pieces(click.Context(command))[1:]:
            yield from (f"`{' '.join([name, *arguments])}`", "")
        yield from _paragraphs(command.help or "")
        options = _options(name, command)
        yield from _own_options(command, [option for option in options if _row(option) not in common])
        further = {common[_row(option)]: None for option in options if _row(option) in common}
        if name in SETTLED:
            further["the [settings of `up`](#blockyard-up)"] = None
        further |= dict.fromkeys(_to_reach_a_router(command))
        if further:
            yield from (f"Also: {', '.join(further)}.", "")


def _options(name: str, command: click.Command) -> list[click.Option]:
    """Return a command's options, without those that reach a router, and without settings that `up` lists."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    own = [option for option in options if not _is_shared(option) and option.name != "config"]
    return [option for option in own if name not in SETTLED or not isinstance(option, Setting)]


def _own_options(command: click.Command, options: list[click.Option]) -> Iterator[str]:
    """Yield one list, or one for each group in the command's help."""
    groups = list(grouped(options))
    if len(groups) < 2 or not isinstance(command, GroupedCommand):
        yield from _option_list(options)
        return
    for group, members in groups:
        if group != TESTS:
            yield from (f"**{group}**", "")
            yield from _option_list(members)


def common_options() -> tuple[dict[str, str], list[str]]:
    """Return what stands for an option that several commands have, by its row, and the lists of these options.

    Options that the same commands have, four of them or more, make a list with a heading of its own. Other options of
    four commands or more are in the last list.
    """
    commands: dict[str, list[str]] = defaultdict(list)
    flags = {}
    for name, command in all_commands():
        for option in _options(name, command):
            if name != UP or not isinstance(option, Setting):
                commands[_row(option)].append(name.removeprefix("blockyard "))
                flags[_row(option)] = _flag(option)
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for row, names in commands.items():
        alike[tuple(names)].append(row)
    shown: dict[str, str] = {}
    lines, others = [], []
    for users, rows in alike.items():
        if len(users) > 1 and len(rows) >= MANY:
            title = f"Options of {' and '.join(sorted({name.split()[0] for name in users}))}"
            lines += [f"## {title}", "", *rows, ""]
            shown |= dict.fromkeys(rows, f"[{title.lower()}](#{title.lower().replace(' ', '-')})")
        elif len(users) >= MANY:
            others += rows
    shown |= {row: _code(flags[row]) for row in others}
    return shown, [*lines, "## Options of many commands", "", *others, ""]


def _to_reach_a_router(command: click.Command) -> Iterator[str]:
    """Yield a link to the options by which commands reach a router, with the names of those that this one lacks."""
    taken = {option.name for option in command.params if _is_shared(option)}
    if taken:
        missing = [_code(option.opts[0]) for option in _all_shared() if option.name not in taken]
        but = f" but {', '.join(missing)}" if missing else ""
        yield f"[router options](#reaching-a-router){but}"


def _reaching() -> Iterator[str]:
    yield from ("## Reaching a router", "")
    yield from _option_list(_all_shared())
    yield from ("`-c`, `--config FILE`: a file of settings. These commands read its `[client]`.", "")


def _all_shared() -> list[click.Option]:
    """Return the options of all commands that call a router, each once."""
    parameters = (parameter for _, command in all_commands() for parameter in command.params)
    return list({option.name: option for option in parameters if _is_shared(option)}.values())


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text. A paragraph with click's backspace mark keeps its lines."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("```text", *paragraph.replace("\b\n", "").splitlines(), "```", "")
        else:
            yield from (_one_line(paragraph), "")


def _is_shared(option: click.Parameter) -> TypeGuard[Setting]:
    return isinstance(option, Setting) and option.section == "client"


def _option_list(options: list[click.Option]) -> Iterator[str]:
    """Yield a line for each option, or one for neighbours that are explained alike."""
    for told, alike in groupby(options, key=_told):
        flags = [_row(option).removeprefix("- ").removesuffix(told) for option in alike]
        yield f"- {', '.join(flags)}{told}"
    if options:
        yield ""


def _row(option: click.Option) -> str:
    *short, flag = sorted(option.opts, key=len)
    often = "..." if _one_line(option.help).endswith(OFTEN) else ""
    takes = "" if option.is_flag else f" {_takes(option)}{often}"
    default = f" ({_default(option)})" if _default(option) else ""
    return f"- {', '.join(map(_code, [*short, flag + takes]))}{default}{_told(option)}"


def _told(option: click.Option) -> str:
    """Return what an option does. Its form shows that it may be given more than once."""
    told = _one_line(option.help).removesuffix(OFTEN).strip()
    return f": {told}" if told else ""


def _takes(option: click.Option) -> str:
    return option.make_metavar(click.Context(root)).removesuffix(" RANGE")


def _flag(option: click.Option) -> str:
    return max(option.opts, key=len)


def _settings() -> Iterator[str]:
    yield from ("## Settings", "")
    yield from (SETTINGS_HEAD, "")
    settings = sorted(
        known_settings(root).values(), key=lambda setting: list(SECTIONS).index(setting.section)
    )
    yield from ("| section | of | keys |", "|---|---|---|")
    for section, members in groupby(settings, key=lambda setting: setting.section):
        yield f"| `[{section}]` | {_one_line(SECTIONS[section])} | {', '.join(map(_key, members))} |"
    yield from ("", "These have other variables:", "")
    for setting in settings:
        if list(setting.variables) != [f"{PREFIX}{setting.key.upper()}"]:
            variables = ", ".join(map(_code, setting.variables))
            yield f"- `{setting.key}` of `[{setting.section}]`: {variables}"
    yield ""
    for setting in settings:
        yield from _pair_rows(setting)


def _key(setting: Setting) -> str:
    """Return a setting's key, with its flag where that is another word."""
    flag = _flag(setting)
    is_same = flag == f"--{setting.key.replace('_', '-')}"
    return _code(setting.key) if is_same else f"{_code(setting.key)} ({_code(flag)})"


def _pair_rows(setting: Setting) -> Iterator[str]:
    """Yield the names that NAME=VALUE may have, if they are known."""
    if setting.pairs:
        yield from (f"Names in the table `{setting.key}`:", "")
        for pair in setting.pairs:
            yield f"- {_code(pair.name)} ({_code(str(pair.default))}): {_one_line(pair.description.help)}"
        yield ""


def _default(option: click.Option) -> str:
    has_one = isinstance(option.default, str | int | float) and not isinstance(option.default, bool)
    return _code(f"{option.default}") if has_one and not option.is_flag else ""


def _code(text: str) -> str:
    return f"`{text}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def main() -> int:
    path = Path(sys.argv[1])
    found = path.read_text(encoding="utf-8")
    made = rewritten(found)
    if "--check" not in sys.argv[2:]:
        path.write_text(made, encoding="utf-8")
        return 0
    if found == made:
        return 0
    print(f"{path} is out of date, run `python -m tools.cli_reference {path}`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
