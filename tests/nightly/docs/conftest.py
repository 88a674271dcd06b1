"""One cluster for all documents and examples: the demo model on two workers, Redis and a router, as real processes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from blockyard.router.client import Client

from tests.system.harness import eventually
from tests.system.processes import processes

ENGINE = ("--device", "cpu", "--kv-cache-memory", str(36 * 2**20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where the cluster's router serves, as host:port."""

    grpc: str
    http: str


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with processes(tmp_path_factory.mktemp("docs"), with_redis=True) as cluster:
        cluster.start(cluster.add_worker("worker-0", *ENGINE), cluster.add_worker("worker-1", *ENGINE))
        process = cluster.add_router("router-0", "--http-port", "0")
        cluster.start(process)
        with Client(process.address) as client:
            assert eventually(lambda: client.cluster_info().workers_ready == 2, seconds=60.0)
        gateway = re.search(r"http://(\S+)/v1", process.log_text())
        assert gateway is not None, process.log_text()
        yield Served(grpc=process.address, http=gateway[1])


@pytest.fixture
def router(served: Served) -> str:
    """Its address."""
    return served.grpc


@pytest.fixture
def gateway(served: Served) -> str:
    """Its address for OpenAI's API."""
    return served.http
