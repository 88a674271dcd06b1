"""A Ray cluster of two nodes on this machine, of an operator who follows docs/deploying.md."""

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from blockyard.deploy.dashboard.start_hook import HOOK_VARIABLE
from blockyard.deploy.machine.processes import ProcessIdentity, end_session, session_members
from blockyard.deploy.ray.head import RayHead, free_port, start_head

DOCUMENT = Path(__file__).parents[3] / "docs" / "deploying.md"
JOIN_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that has joined: a session of processes."""

    session: int
    processes: tuple[ProcessIdentity, ...]

    def pids(self) -> frozenset[int]:
        return frozenset(member.pid for member in session_members(self.session))

    def end(self) -> None:
        end_session(self.session, self.processes)


@contextmanager
def operators_head(
    *, num_cpus: int = 2, hook: str | None = None, python_path: Path | None = None
) -> Iterator[RayHead]:
    """Start an operator's Ray. In the context, commands of this process have its token. `hook` replaces ours;
    `python_path` comes before everything else that its Python finds. The folder's path must be short: Ray puts sockets
    in it."""
    directory = Path(tempfile.mkdtemp(prefix="by-nodes-", dir="/tmp"))
    head = None
    try:
        with pytest.MonkeyPatch.context() as environment:
            if hook is not None:
                environment.setenv(HOOK_VARIABLE, hook)
            if python_path is not None:
                environment.setenv("PYTHONPATH", str(python_path), prepend=":")
            head = start_head(directory, num_cpus=num_cpus)
        recorded = session_members(head.session)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("RAY_AUTH_MODE", "token")
            environment.setenv("RAY_AUTH_TOKEN_PATH", str(head.token_path))
            yield head
    finally:
        if head is not None:
            end_session(head.session, recorded)
        shutil.rmtree(directory)


@contextmanager
def second_node(head: RayHead, *, num_cpus: int, python_path: Path | None = None) -> Iterator[Node]:
    """Join as the document says. `python_path`, if given, is where the node finds the package."""
    environment = dict(os.environ)
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    program, *arguments = shlex.split(documented_join().replace("HEAD:6379", head.address))
    assert program == "ray"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *arguments, f"--num-cpus={num_cpus}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        code = process.wait(JOIN_SECONDS)
        log.seek(0)
        assert code == 0, log.read().decode()
    node = Node(session=process.pid, processes=tuple(session_members(process.pid)))
    try:
        yield node
    finally:
        node.end()


@contextmanager
def documented_head(directory: Path, port: int, **variables: str) -> Iterator[Node]:
    """Start a head as the document says, with its own variables, but for `variables`. Nothing watches its processes.

    The folder's path must be short: Ray puts sockets in it. It holds the token.
    """
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    program, *arguments = shlex.split(documented("ray start --head").replace("6379", str(port)))
    assert program == "ray"
    ours = (f"--temp-dir={directory / 'ray'}", "--num-cpus=2", "--object-store-memory=100000000")
    ports = (f"--ray-client-server-port={free_port()}", f"--dashboard-port={free_port()}")
    environment = {**os.environ, **documented_variables(), "RAY_AUTH_TOKEN_PATH": str(token), **variables}
    with (directory / "start.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *arguments, *ours, *ports],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        assert process.wait(JOIN_SECONDS) == 0, (directory / "start.log").read_text()
        yield Node(session=process.pid, processes=tuple(session_members(process.pid)))
    finally:
        end_session(process.pid, session_members(process.pid))


def documented_variables() -> dict[str, str]:
    """Return Ray's variables that the document sets for the head."""
    return dict(re.findall(r"^export (RAY_\w+)=(\S+)", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))


def documented_join() -> str:
    """Return the command with which the document has a second machine join."""
    return documented("ray start --address")


def documented(command: str) -> str:
    """Return the one line of the document that begins with this command."""
    (line,) = {
        line.partition("#")[0].strip()
        for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
        if line.startswith(command)
    }
    return line
