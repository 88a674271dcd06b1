"""A real cluster for a module's tests: Redis, Ray, two workers on the demo checkpoint and a router."""

from collections.abc import Iterator

import pytest

from .harness import UP, Cluster, Command, remembered_state


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    command = Command(home=tmp_path_factory.mktemp("home"), cluster="trial")
    result = command.run(*UP)
    assert result.returncode == 0, result.stderr
    remembered = remembered_state(command)
    try:
        yield Cluster(command=command, state=remembered)
    finally:
        if (command.home / "trial.json").exists():
            command.run("down", "--drain", "0")
