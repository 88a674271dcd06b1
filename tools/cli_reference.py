"""Writes the reference part of docs/cli.md, from the commands themselves.

    python -m tools.cli_reference docs/cli.md            # writes
    python -m tools.cli_reference docs/cli.md --check    # fails where the file differs, and writes nothing

Owns the form of the reference. The text above MARKER in that file is written by hand and kept.
"""

import inspect
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TypeGuard

import click
from blockyard.deploy.cli import main as root
from blockyard.deploy.settings.config_file import known_settings
from blockyard.deploy.settings.effective import SECTIONS
from blockyard.deploy.settings.setting import GroupedCommand, Setting, grouped

MARKER = "<!-- From here on generated: python -m tools.cli_reference docs/cli.md -->"
Named = tuple[str, click.Command]


def reference() -> str:
    """Return the reference: every command with its options, then every setting."""
    return "\n".join([MARKER, "", *_commands(), *_settings()]) + "\n"


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


def _commands() -> Iterator[str]:
    yield from ("## Commands", "")
    for name, command in all_commands():
        usage = " ".join([name, *command.collect_usage_pieces(click.Context(command))])
        yield from (f"### {name}", "", f"`{usage}`", "", *_paragraphs(command.help or ""))
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        own = [option for option in options if not _is_shared(option) and option.name != "config"]
        if name.endswith((" config show", " serve")):
            own = [option for option in own if not isinstance(option, Setting)]
            yield from ("The settings of `up`, and:", "")
        yield from _own_options(command, own)
        yield from _shared_options(options)
    yield from ("## Reaching a router", "")
    yield from _option_table(_all_shared())
    yield from ("`-c`, `--config FILE`: a file of settings. These commands read its `[client]`.", "")


def _own_options(command: click.Command, options: list[click.Option]) -> Iterator[str]:
    """Yield one table, or one for each group in the command's help."""
    groups = list(grouped(options))
    if len(groups) < 2 or not isinstance(command, GroupedCommand):
        yield from _option_table(options)
        return
    for group, members in groups:
        yield from (f"**{group}**", "")
        yield from _option_table(members)


def _shared_options(options: list[click.Option]) -> Iterator[str]:
    """Yield a link to the table of shared options, with the names of those that this command lacks."""
    taken = {option.name for option in options if _is_shared(option)}
    if taken:
        missing = [_code(option.opts[0]) for option in _all_shared() if option.name not in taken]
        but = f", but {', '.join(missing)}" if missing else ""
        yield from (f"And the [options to reach a router](#reaching-a-router){but}.", "")


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


def _option_table(options: list[click.Option]) -> Iterator[str]:
    if options:
        yield from ("| option | default | what |", "|---|---|---|")
        yield from (_option_row(option) for option in options)
        yield ""


def _option_row(option: click.Option) -> str:
    *short, flag = sorted(option.opts, key=len)
    takes = "" if option.is_flag else f" {option.make_metavar(click.Context(root))}"
    return (
        f"| {', '.join(map(_code, [*short, flag + takes]))} | {_default(option)} | {_one_line(option.help)} |"
    )


def _settings() -> Iterator[str]:
    yield from ("## Settings", "")
    yield "Flags take precedence, then `BLOCKYARD_UP_...` and the other variables, then the file."
    yield ""
    settings = sorted(
        known_settings(root).values(), key=lambda setting: list(SECTIONS).index(setting.section)
    )
    for section, members in groupby(settings, key=lambda setting: setting.section):
        yield from (f"### [{section}]", "", SECTIONS[section], "")
        yield from ("| key | variable | is | default |", "|---|---|---|---|")
        listed = list(members)
        yield from (_setting_row(setting) for setting in listed)
        yield ""
        for setting in listed:
            yield from _pair_rows(setting)


def _setting_row(setting: Setting) -> str:
    variables = ", ".join(map(_code, setting.variables))
    return f"| {_code(setting.key)} | {variables} | {_escaped(setting.kind)} | {_default(setting)} |"


def _pair_rows(setting: Setting) -> Iterator[str]:
    """Yield a table of the names that NAME=VALUE may have, if they are known."""
    if setting.pairs:
        yield from (f"Names in the table `{setting.key}`:", "", "| name | default | what |", "|---|---|---|")
        for pair in setting.pairs:
            yield f"| {_code(pair.name)} | {_code(str(pair.default))} | {_one_line(pair.description.help)} |"
        yield ""


def _default(option: click.Option) -> str:
    has_one = isinstance(option.default, str | int | float) and not isinstance(option.default, bool)
    return _code(f"{option.default}") if has_one and not option.is_flag else ""


def _code(text: str) -> str:
    return f"`{_escaped(text)}`"


def _one_line(text: str | None) -> str:
    return _escaped(" ".join((text or "").split()))


def _escaped(text: str) -> str:
    """Escape bars, which end a table's cell."""
    return text.replace("|", "\\|")


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
