"""The fixtures of tests/unit/index."""

from tests.unit.index.conftest import backend as backend
from tests.unit.index.conftest import harness as harness
from tests.unit.index.conftest import redis_harness as redis_harness
from tests.unit.index.conftest import redis_process as redis_process
from tests.unit.index.conftest import shards as shards
