"""Real Redis servers, alone and sharing the prefixes, equal the brute force of the state machine."""

import uuid

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess
from blockyard.proto.index.redis import connect
from blockyard.proto.index.shards import shard_of
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from tests.nightly.index.sharded import ShardedHarness
from tests.unit.index.harness import IndexHarness, RedisHarness
from tests.unit.index.machine import IndexMachine, budget
from tests.unit.index.truth import ALL_CHAINS, ROOTS, name_of


@pytest.fixture
def redis_machine(redis_process: RedisProcess) -> type[IndexMachine]:
    class RedisMachine(IndexMachine):
        def make_harness(self) -> IndexHarness:
            self.client = connect(redis_process.url, timeout_seconds=5.0)
            return RedisHarness(self.client, cluster=f"property-{uuid.uuid4().hex}")

        def teardown(self) -> None:
            if hasattr(self, "client"):
                self.run(self.client.aclose())
            super().teardown()

    return RedisMachine


@pytest.fixture
def sharded_machine(shards: list[RedisProcess]) -> type[IndexMachine]:
    roots = {ROOTS[name_of(path)] for path in ALL_CHAINS}
    assert len({shard_of(root, len(shards)) for root in roots}) > 1, "one server would have all chains"

    class ShardedMachine(IndexMachine):
        def make_harness(self) -> IndexHarness:
            self.clients = [connect(process.url, timeout_seconds=5.0) for process in shards]
            return ShardedHarness(self.clients, cluster=f"property-{uuid.uuid4().hex}")

        def teardown(self) -> None:
            for client in getattr(self, "clients", ()):
                self.run(client.aclose())
            super().teardown()

    return ShardedMachine


def test_redis_equals_the_brute_force_through_any_history(redis_machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(redis_machine, settings=budget(25))


def test_shards_equal_the_brute_force_through_any_history(sharded_machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(sharded_machine, settings=budget(15))
