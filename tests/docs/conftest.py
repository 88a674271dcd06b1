"""One cluster for all documents and examples: the demo model on two workers, Redis and a router, as real processes."""

from collections.abc import Iterator

import pytest
from blockyard.router.client import Client

from .rig import eventually, processes

ENGINE = ("--device", "cpu", "--kv-cache-memory", str(36 * 2**20))


@pytest.fixture(scope="package")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    with processes(tmp_path_factory.mktemp("docs"), with_redis=True) as cluster:
        cluster.start(cluster.add_worker("worker-0", *ENGINE), cluster.add_worker("worker-1", *ENGINE))
        process = cluster.add_router("router-0")
        cluster.start(process)
        with Client(process.address) as client:
            assert eventually(lambda: client.cluster_info().workers_ready == 2, seconds=60.0)
        yield process.address
