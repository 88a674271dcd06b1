"""A cluster for the tests that change it."""

from collections.abc import Iterator

import pytest

from tests.system.harness import UP, Cluster, Command, running


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    command = Command(home=tmp_path_factory.mktemp("home"), cluster="trial")
    with running(command, *UP, "--cpus-per-worker", "0.5", "--dtype", "float32") as cluster:
        yield cluster
