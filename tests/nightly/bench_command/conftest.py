"""A cluster of real processes on the simulated engine (two workers, Redis, a router), and the command against it."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from blockyard.deploy.cli import main
from blockyard.router.client import Client
from click.testing import CliRunner, Result

from tests.system.harness import eventually
from tests.system.processes import SIMULATED, processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """`bench.run("random", ...)` types `blockyard bench random ...`."""

    router: str
    url: str
    """URL of the router's gateway."""

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["bench", *arguments, "--router", self.router])

    def json(self, *arguments: str) -> dict[str, Any]:
        result = self.run(*arguments, "--output", "json")
        assert result.exit_code == 0, result.output
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    def results(self, *arguments: str) -> dict[str, Any]:
        """Run the command and return the results of the router's own policy."""
        found: dict[str, Any] = self.json(*arguments)["results"]["prefix"]
        return found


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with processes(tmp_path_factory.mktemp("bench"), with_redis=True) as cluster:
        cluster.start(cluster.add_worker("w0", *SIMULATED), cluster.add_worker("w1", *SIMULATED))
        router = cluster.add_router("r0", "--http-port", "0")
        cluster.start(router)
        with Client(router.address) as client:
            assert eventually(lambda: client.cluster_info().workers_ready == 2, seconds=60.0)
        gateway = re.search(r"http://\S+(?=/v1)", router.log_text())
        assert gateway is not None
        yield Bench(router=router.address, url=gateway[0])
