"""Fault matrix fixtures, and the report that `make faults` writes. A row puts its figures into `measured`
(tests/conftest.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .redis_rig import RedisCluster, redis_cluster_in
from .report import FaultReport

REPORT_OPTION = "--faults-report"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        REPORT_OPTION, type=Path, metavar="FILE", help="rewrite the fault matrix's table in FILE"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FaultReport(config.getoption(REPORT_OPTION, default=None)))


@pytest.fixture(scope="package")
def shared_redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster_in(tmp_path_factory.mktemp("redis-faults")) as cluster:
        yield cluster


@pytest.fixture
def redis_cluster(shared_redis_cluster: RedisCluster) -> Iterator[RedisCluster]:
    """Yield one cluster for all rows of Redis, and make it whole again after each."""
    yield shared_redis_cluster
    shared_redis_cluster.proxy.heal()
    shared_redis_cluster.redis.mend()
