"""Rows 21 and 23 on a real link between two network namespaces, where the machine can make them (network_rows.py)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROW_SECONDS = 240.0
ISOLATED = ("unshare", "--user", "--map-root-user", "--net")
NEEDED = (
    "ip link add a0 type veth peer name b0 && tc qdisc add dev a0 root tbf rate 1mbit burst 2kb limit 3kb"
)


@pytest.fixture(scope="module", autouse=True)
def networks_can_be_made() -> None:
    if any(shutil.which(program) is None for program in ("unshare", "nsenter", "ip", "tc")):
        pytest.skip("unshare, nsenter, ip and tc are needed")
    tried = subprocess.run([*ISOLATED, "sh", "-c", NEEDED], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no virtual link can be made: {tried.stderr.strip()[:100]}")


def _measured(row: str, folder: Path) -> dict[str, Any]:
    command = [*ISOLATED, sys.executable, "-m", "tests.nightly.faults.network_rows", row, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ROW_SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    measured: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return measured


@pytest.mark.fault(21)
def test_a_link_that_goes_down_moves_streams_and_brings_each_token_once(
    tmp_path: Path, measured: dict[str, Any]
) -> None:
    measured.update(_measured("cut", tmp_path))


@pytest.mark.fault(23)
def test_a_link_that_carries_little_is_slower_and_nobody_is_taken_for_dead(
    tmp_path: Path, measured: dict[str, Any]
) -> None:
    measured.update(_measured("narrow", tmp_path))
