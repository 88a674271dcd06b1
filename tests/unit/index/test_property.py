"""The twin equals a brute force over the true caches of the workers, whatever happens to workers and index."""

from hypothesis.stateful import (
    run_state_machine_as_test,
)

from .harness import IndexHarness, TwinHarness
from .machine import IndexMachine, budget


class TwinMachine(IndexMachine):
    def make_harness(self) -> IndexHarness:
        return TwinHarness()


def test_the_twin_equals_the_brute_force_through_any_history() -> None:
    run_state_machine_as_test(TwinMachine, settings=budget(150))
