"""A real cluster: Redis, Ray, two workers on the demo checkpoint and a router.

Each costs half a minute, so the modules test_cluster*.py share one. pytest runs them one after the other, and the last
of them takes it down.
"""

from collections.abc import Iterator

import pytest

from .harness import UP, Cluster, Command, remembered_state


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a cluster with room for four workers. It uses float32: tokens are compared with those of transformers and
    of other batches."""
    command = Command(home=tmp_path_factory.mktemp("home"), cluster="trial")
    result = command.run(*UP, "--cpus-per-worker", "0.5", "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    remembered = remembered_state(command)
    try:
        yield Cluster(command=command, state=remembered)
    finally:
        if (command.home / "trial.json").exists():
            command.run("down", "--drain", "0")
