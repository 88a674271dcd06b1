"""A home of its own for each test of `deploy`, and a supervisor without Ray."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blockyard.deploy.machine import state

from .incarnations import FakeIncarnations, until

SETTINGS = ("REDIS_URL", "ROUTER_REDIS_URL", "ROUTER", "CLUSTER", "CONFIG", "TOKEN", "TOKEN_FILE")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for state files, which is not there yet. No variable of the user's reaches a test."""
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name in SETTINGS:
        monkeypatch.delenv(f"BLOCKYARD_{name}", raising=False)
    return tmp_path / "home"


@pytest.fixture
async def supervisor() -> AsyncIterator[FakeIncarnations]:
    """Yield a supervisor whose first worker has begun."""
    made = FakeIncarnations()
    await until(lambda: len(made.incarnations) == 1)
    yield made
    await made.leave()
