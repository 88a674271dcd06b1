"""The tool tells tests that notice a change from tests that do not."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from .__main__ import ROOT, main
from .rows import of_rows, texts

PRODUCT = """
def is_old(age: int) -> bool:
    return age >= 18
"""
PUBLISHER = ("worker/indexing/publisher.py", "worker/indexing/net_difference.py")
TESTS_OF_IT = tuple(
    f"tests/unit/index/test_{name}.py" for name in ("publisher", "index_state", "spot_checks")
)
TESTS = """
from router.ages import is_old

def test_age():
    assert is_old(20) and not is_old(16)
"""


def test_a_change_that_a_test_notices_is_killed_and_the_others_survive(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "router/ages.py": PRODUCT,
        "tests/test_ages.py": TESTS,
        "pytest.ini": "[pytest]",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    out = tmp_path / "out.json"
    assert main(["router", "--tree", str(tmp_path), "--tests", "tests", "--out", str(out)]) == 0
    assert "2 survived, 1 killed" in capfd.readouterr().out
    assert main(["router", "--tree", str(tmp_path), "--tests", "tests", "--again", str(out)]) == 0
    assert "1 killed\n" in capfd.readouterr().out


def test_the_mutants_of_rows_fit_the_product() -> None:
    for _, mutant in of_rows([]):
        for path, text in texts(ROOT, mutant).items():
            compile(text, str(path), "exec")


@pytest.mark.timeout(900)
def test_tests_of_today_kill_mutants_of_the_publisher(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*PUBLISHER, "--runs", "6", "--tests", *TESTS_OF_IT]) == 0
    verdicts = Counter(line.partition(" ")[0] for line in capfd.readouterr().out.splitlines())
    assert verdicts["killed"] >= 3
