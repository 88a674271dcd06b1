"""Forty seconds of the soak pass."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.nightly.faults.soak import Soak, soaked, told


@pytest.mark.fault(50)
def test_forty_seconds_of_random_faults_leave_everything_as_it_was(
    tmp_path: Path, measured: dict[str, Any]
) -> None:
    soak = Soak(seed=random.randrange(10**6), minutes=40 / 60)
    soaked(soak, tmp_path)
    print("\n".join(told(soak, ["soak"])))
    assert soak.failure == ""
    assert soak.load is not None
    struck = soak.load.struck
    measured.update(
        failed=sum(each.failed for each in struck),
        migrated=sum(each.migrated for each in struck),
        recovery_seconds=max(each.longest_pause for each in struck),
        note=f"{len(struck)} faults in 40 s; failed: lost with the router that held them",
    )
    assert len(struck) >= 3
    assert soak.load.outcomes["finished"] > len(struck)
    assert len(soak.samples.redis) >= 3
