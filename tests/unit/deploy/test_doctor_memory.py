"""The memory of this machine, as `doctor` describes it."""

import pytest
from blockyard.deploy.lifecycle.doctor import memory_finding

GIB = 2**30


@pytest.mark.parametrize(
    ("total_gib", "available_gib", "verdict", "told"),
    [
        (64, 40, "ok", "40.0 GiB available"),
        (64, 6, "warn", "6.0 GiB available (Ray and two small workers take about 2), 9% of 64.0 GiB"),
        (8, 1, "warn", "1.0 GiB available"),
    ],
)
def test_little_memory_is_a_warning_absolutely_and_as_a_share(
    total_gib: int, available_gib: int, verdict: str, told: str
) -> None:
    finding = memory_finding(total_gib * GIB, available_gib * GIB)
    assert finding.verdict == verdict
    assert told in finding.detail
