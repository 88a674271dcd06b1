"""The index in memory for the suites of the contract."""

import pytest

pytest.register_assert_rewrite("tests.unit.index.contract_suite", "tests.unit.index.host_tier_suite")

from .harness import IndexHarness, TwinHarness  # noqa: E402


@pytest.fixture
def harness() -> IndexHarness:
    return TwinHarness()
