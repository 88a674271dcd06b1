"""A host with a part of the control plane is cut off and comes back: three hosts with a Ray node each (three_hosts.py).

Rows 87 to 90. Each row is a process of its own, because a network namespace is that of a whole process.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ISOLATED = ("unshare", "--user", "--map-root-user", "--net")
NEEDED = "ip link add b0 type bridge && ip link add a0 type veth peer name a1"
START_SECONDS = 400.0
ROW_SECONDS = 450.0
"""Limit on a row without its cut. A node that Ray has ended joins again, and its worker starts there."""
CUTS = (5, 25, 65, 120)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a short path, because Ray puts sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="by-h", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def networks_can_be_made() -> None:
    if any(shutil.which(program) is None for program in ("unshare", "nsenter", "ip")):
        pytest.skip("unshare, nsenter and ip are needed")
    tried = subprocess.run([*ISOLATED, "sh", "-c", NEEDED], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no bridge can be made: {tried.stderr.strip()[:100]}")


def measure(folder: Path, part: str, cuts: tuple[int, ...], *options: str) -> dict[str, Any]:
    """Try cuts of one part's host, one after the other, on one cluster. Return what they cost together."""
    rows = [f"{part}:{seconds}" for seconds in cuts]
    command = [
        *ISOLATED,
        sys.executable,
        "-m",
        "tests.nightly.faults.control_plane_rows",
        str(folder),
        *rows,
        *options,
    ]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=START_SECONDS + sum(cuts) + ROW_SECONDS * len(cuts),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(told) == len(cuts)
    return {
        "failed": sum(row["failed"] for row in told),
        "recovery_seconds": max(row["recovery_seconds"] for row in told),
        "note": "; ".join(row["note"] for row in told),
    }


@pytest.mark.fault(87)
@pytest.mark.timeout(600)
def test_a_supervisor_that_was_cut_off_for_longer_than_a_hang_ends_nobody(
    folder: Path, measured: dict[str, Any]
) -> None:
    """The cut is longer than --hung-seconds. Without epochs this failed in two of three tries, as TCP's pauses fell.

    tests/unit/deploy/test_leadership.py has the same property without chance.
    """
    measured.update(measure(folder, "supervisor", (32,)))


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "part",
    [
        pytest.param("supervisor", marks=pytest.mark.fault(87)),
        pytest.param("head", marks=pytest.mark.fault(88)),
        pytest.param("worker", marks=pytest.mark.fault(89)),
        pytest.param("router", marks=pytest.mark.fault(90)),
    ],
)
def test_no_worker_or_router_within_reach_ends_while_a_host_is_cut_off_or_comes_back(
    part: str, folder: Path, measured: dict[str, Any]
) -> None:
    measured.update(measure(folder, part, CUTS))
