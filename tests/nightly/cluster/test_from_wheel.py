"""The steps of a new user from the wheel to the first token: one command installs it, one serves, and one asks.

Of this machine's set-up the test uses only Python, curl and pip's settings. The virtual environment is new, the home is
empty, and the cluster's files are in a temporary folder of their own. With -s it shows the time of each step.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from .rig import DOWN_SECONDS, Served, processes_of, until_it_serves

pytestmark = pytest.mark.timeout(2400)

ROOT = Path(__file__).parents[3]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "proto", "kernels", "worker", "router", "deploy")
"""Sources of the wheel, as deploy/Dockerfile copies them."""
INSTALL_SECONDS = 1800.0
"""PyTorch's build for CUDA is gigabytes."""
TOKEN_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A new user with an empty home, a virtual environment, and a temporary folder."""

    home: Path
    venv: Path
    temporary: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if _is_of_the_network(name)}
        path = f"{self.venv / 'bin'}:/usr/bin:/bin"
        return {**kept, "HOME": str(self.home), "PATH": path, "TMPDIR": str(self.temporary)}

    def start(self, *command: str) -> "subprocess.Popen[str]":
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program is not None, command[0]
        return subprocess.Popen(
            (program, *command[1:]),
            env=self.environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str) -> None:
        with self.start(*command) as process:
            _, errors = process.communicate(timeout=INSTALL_SECONDS)
        assert process.returncode == 0, errors


def _is_of_the_network(name: str) -> bool:
    return name.startswith("PIP_") or name.lower().endswith("_proxy")


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    """Yield a new user with a short temporary folder, because Ray puts sockets there, and an empty virtual
    environment."""
    home, venv = tmp_path / "home", tmp_path / "venv"
    home.mkdir()
    subprocess.run((sys.executable, "-m", "venv", str(venv)), check=True, timeout=TOKEN_SECONDS)
    with tempfile.TemporaryDirectory(prefix="by-") as temporary:
        yield User(home=home, venv=venv, temporary=Path(temporary))
    shutil.rmtree(venv)  # pytest would keep gigabytes of it


@contextmanager
def timed(part: str) -> Iterator[None]:
    started_at = time.monotonic()
    yield
    print(f"{part}: {time.monotonic() - started_at:.2f} s")


def build_wheel(folder: Path) -> Path:
    """Build the wheel with setuptools, from a copy: the build leaves files beside its sources."""
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, sources / name)
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder))
    subprocess.run((*command, str(sources)), check=True, timeout=INSTALL_SECONDS)
    (wheel,) = folder.glob("*.whl")
    return wheel


@contextmanager
def serving(user: User, *arguments: str) -> Iterator[Served]:
    """Serve, end it by Ctrl-C, and check that nothing is left."""
    with user.start("blockyard", "serve", "demo", *arguments) as process:
        try:
            with timed("from `serve` until it serves"):
                served = Served(process=process, told=until_it_serves(process))
            yield served
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=DOWN_SECONDS)
    assert (process.returncode, processes_of(user.home)) == (0, []), errors
    assert list((user.home / ".blockyard").glob("*.json")) == []
    assert list(user.temporary.iterdir()) == []


def first_text(user: User, url: str) -> str:
    """Stream a completion with curl, and return the first text that comes."""
    asked = {"model": "demo", "prompt": "def read_lines(path):", "max_tokens": 48, "stream": True}
    header = ("-H", "Content-Type: application/json")
    curl = ("curl", "-sS", "-N", "--max-time", str(TOKEN_SECONDS), f"{url}/completions", *header)
    with user.start(*curl, "-d", json.dumps(asked)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("data: {") and (text := json.loads(line[6:])["choices"][0]["text"]):
                process.terminate()
                return str(text)
    raise AssertionError("the stream has ended without a token")


def test_three_commands_lead_from_the_wheel_to_the_first_token(user: User, tmp_path: Path) -> None:
    (dist := tmp_path / "dist").mkdir()
    with timed("the wheel"):
        wheel = build_wheel(dist)
    with timed("pip install WHEEL[serve]"):
        user.run("pip", "install", "--quiet", "-c", str(ROOT / "requirements.lock"), f"{wheel}[serve]")
    with serving(user, "--port", "0", "--router-port", "0") as served, timed("the first token"):
        assert first_text(user, served.value("HTTP"))
