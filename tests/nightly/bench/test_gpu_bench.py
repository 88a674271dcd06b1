"""`make gpu-bench` runs one benchmark after another on the one GPU, and a failure does not stop the others."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = """#!/bin/bash
echo "begin $*" >> LOG
sleep 0.1
echo end >> LOG
[[ "$*" != *llama-3.1-8b* ]]
"""


@pytest.mark.parametrize(
    ("target", "reports"),
    [
        ("gpu-bench", ["", "profile-gpu-8b", "profile-gpu", "engine-gpu-nano", "engine-gpu"]),
        ("gpu-bench-profile", ["profile-gpu-8b", "profile-gpu"]),
    ],
)
def test_parts_run_alone_and_all_of_them_where_one_fails(
    target: str, reports: list[str], tmp_path: Path
) -> None:
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(PYTHON.replace("LOG", str(log)))
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "-j4", target, f"PYTHON={python}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode, "who calls it learns of the part that failed"
    begun, ended = (log.read_text().splitlines()[turn::2] for turn in (0, 1))
    assert ended == ["end"] * len(reports), "two ran at once"
    named = [line.partition("--name ")[2].partition(" ")[0] for line in begun]
    assert named == reports
