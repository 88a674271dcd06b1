"""Real Redis servers equal the brute force of the state machine."""

import uuid

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess
from blockyard.proto.index.redis import connect
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from tests.unit.index.harness import IndexHarness, RedisHarness
from tests.unit.index.machine import IndexMachine, budget


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


def test_redis_equals_the_brute_force_through_any_history(redis_machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(redis_machine, settings=budget(25))
