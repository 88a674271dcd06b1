"""docs/deploying.md: each command in it is valid for its program."""

import re
import shlex

import click
import pytest
from blockyard.deploy.settings.options import model_path

from .commands import ROOT, check_all, commands_in, shell_lines

DOCUMENT = ROOT / "docs" / "deploying.md"
LINES = shell_lines(DOCUMENT)
OTHER_PROGRAMS = ("chmod", "kubectl", "docker", "export", "pip", "uv")


@pytest.mark.parametrize("line", LINES)
def test_every_command_is_one_that_its_program_takes(line: str) -> None:
    assert list(commands_in(line)) or line.split()[0] in OTHER_PROGRAMS, line
    check_all(
        line.replace("/models/model", shlex.quote(model_path("demo")))
    )  # `doctor` looks into the folder


@pytest.mark.parametrize(
    "line",
    [
        "blockyard scale --no-such-option 3",
        "blockyard scale zero",
        "blockyard grow 3",
        "kubectl exec -it head -- blockyard status --wide",
        "ray job submit -- bash -c 'blockyard up --model m --no-such-option'",
    ],
)
def test_a_command_that_is_wrong_is_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        check_all(line)


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"(?:deploy|tests|docs)/[\w./-]+\w", DOCUMENT.read_text(encoding="utf-8")))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
