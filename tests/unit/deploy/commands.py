"""Command lines in documents and manifests, parsed as their programs parse them, without being run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
from blockyard.deploy.cli import main
from ray.scripts.scripts import cli as ray

ROOT = Path(__file__).parents[3]
KUBERAY = ROOT / "deploy" / "kuberay"


def shell_lines(document: Path) -> list[str]:
    """Return the lines of the document's fenced shell blocks."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def commands_in(text: str) -> Iterator[list[str]]:
    """Each `blockyard ...` and `ray ...` of a shell text, those quoted for another shell too."""
    for piece in re.split(r"\|\||&&|;|\n", text):
        words = shlex.split(piece, comments=True)
        for inner in words:
            if " " in inner and re.search(r"\b(blockyard|ray) ", inner):
                yield from commands_in(inner)
        while words and (words[0] == "exec" or re.fullmatch(r"\w+=.*", words[0])):
            words = words[1:]
        if "--" in words[:-1] and words[0] in ("kubectl", "ray"):
            yield from commands_in(shlex.join(words[words.index("--") + 1 :]))
        if words and Path(words[0]).name in ("blockyard", "ray"):
            yield [Path(words[0]).name, *words[1:]]


def check(command: list[str]) -> None:
    """Raises click.UsageError for a command, option or value that the program does not know."""
    program = {"blockyard": main, "ray": ray}[command[0]]
    parse(program, command[0], command[1:])


def parse(
    command: click.Command, name: str, arguments: list[str], parent: click.Context | None = None
) -> None:
    context = command.make_context(name, arguments, parent=parent)
    if isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        found, inner, left = command.resolve_command(context, rest)
        assert found is not None
        assert inner is not None
        parse(inner, found, left, context)


def check_all(text: str) -> None:
    for command in commands_in(text):
        check(command)
