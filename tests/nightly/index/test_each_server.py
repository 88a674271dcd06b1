"""Every version of Redis and Valkey here: the contract, and what only a real server shows."""

import pytest

from tests.system.index.damage_suite import *  # noqa: F403
from tests.system.index.redis_suite import *  # noqa: F403
from tests.unit.index.contract_suite import *  # noqa: F403
from tests.unit.index.harness import IndexHarness, RedisHarness
from tests.unit.index.host_tier_suite import *  # noqa: F403


@pytest.fixture
def harness(redis_harness: RedisHarness) -> IndexHarness:
    return redis_harness
