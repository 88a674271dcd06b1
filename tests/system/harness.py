"""Helpers of the cluster tests: the command that users type, with a home of its own, and a cluster that serves."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.machine import state
from blockyard.router.client import Client

README = Path(__file__).parents[2] / "README.md"


def readme_commands() -> list[tuple[str, ...]]:
    """Return the arguments of each line of the README's block that begins with `up`: what a new user types first."""
    text = README.read_text(encoding="utf-8")
    block = next(
        block for block in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S) if "blockyard up " in block
    )
    typed = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [tuple(arguments) for command, *arguments in typed if command.endswith("blockyard")]


UP = (*readme_commands()[0], "--router-port", "0", "--deterministic")
"""The README's `up` command, but on a free port, and with tokens that can be compared."""
COMMAND_SECONDS = 240.0
UNDO_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The `blockyard` command with a home of its own, so that no test meets a user's cluster."""

    home: Path
    cluster: str

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "blockyard.deploy.cli", *arguments, "--cluster", self.cluster],
            env={**os.environ, state.HOME_VARIABLE: str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        with self.start(*arguments, stdin=subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(stdin, timeout=COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                process.terminate()  # `up` undoes what it has started
                try:
                    process.communicate(timeout=UNDO_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "--output", "json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def place(self, name: str) -> dict[str, Any]:
        """One worker or router as the supervisor knows it."""
        places: list[dict[str, Any]] = self.json("status")["places"]
        return next(place for place in places if place["name"] == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster that serves."""

    command: Command
    state: state.ClusterState

    def client(self) -> Client:
        return Client(list(self.state.routers), timeout_seconds=60.0)


def remembered_state(command: Command) -> state.ClusterState:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(state.HOME_VARIABLE, str(command.home))
        return state.load(command.cluster)


@contextmanager
def running(command: Command, *arguments: str) -> Iterator[Cluster]:
    """Bring a cluster up for the context, by these arguments of the command."""
    result = command.run(*arguments)
    assert result.returncode == 0, result.stderr
    try:
        yield Cluster(command=command, state=remembered_state(command))
    finally:
        if (command.home / f"{command.cluster}.json").exists():
            command.run("down", "--drain", "0")


def eventually(is_so: Callable[[], bool], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.1)
    return False
