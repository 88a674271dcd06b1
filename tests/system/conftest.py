"""One cluster on Ray, and one of plain processes without it, which the tests of a session share.

Each test leaves them as it found them.
"""

from collections.abc import Iterator

import pytest
from blockyard.deploy.lifecycle.cluster import leftovers
from blockyard.deploy.machine.processes import session_members

from .harness import UP, Cluster, Command, remembered_state, running
from .processes import SIMULATED, Processes, free_port, processes


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Bring up Redis, Ray, two workers on the demo checkpoint and a router, with room for four workers. It uses
    float32: tokens are compared with those of transformers and of other batches."""
    command = Command(home=tmp_path_factory.mktemp("home"), cluster="trial")
    with running(command, *UP, "--cpus-per-worker", "0.5", "--dtype", "float32") as cluster:
        yield cluster
        before = remembered_state(command)
        assert before.head is not None
        assert len(session_members(before.head.session)) > 5
        down = command.run("down")
        assert down.returncode == 0, down.stderr
        assert leftovers(before) == []
        assert not command.home.exists()


@pytest.fixture(scope="session")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, http_port: int) -> Iterator[Processes]:
    """Start a private Redis, two simulated workers and a router with both APIs."""
    step = ("--simulated-step-seconds", "0.02")
    with processes(tmp_path_factory.mktemp("plain"), with_redis=True) as plain:
        workers = [plain.add_worker(name, *SIMULATED, *step) for name in ("w0", "w1")]
        options = ("--http-port", str(http_port), "--no-worker-seconds", "120")
        plain.start(*workers, plain.add_router("r0", *options))
        yield plain
