"""The folder of a test alone decides when it runs: tests/unit, tests/system or tests/nightly."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.nightly.conftest import SLICE_SECONDS, slice_of

ROOT = Path(__file__).parents[2]
LEVELS = ("unit", "system", "nightly")


def test_each_test_is_in_one_of_three_folders() -> None:
    found = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert found == {*LEVELS}


def test_ci_runs_each_folder_once_and_tries_nothing_again() -> None:
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    stages = [line.rpartition('" ')[2] for line in lines if line.startswith("stage ")]
    assert stages[-3:] == ["make unit", "make system", "make nightly-slice"]
    assert not [line for line in lines if "make " in line and "||" in line]


@given(st.dictionaries(st.text(), st.integers(0, 400).map(float), max_size=30), st.text())
def test_a_slice_has_every_test_that_its_time_allows(seconds: dict[str, float], commit: str) -> None:
    chosen = [*slice_of(seconds, commit)]
    left = SLICE_SECONDS - sum(seconds[name] for name in chosen)
    assert left >= 0
    assert all(seconds[name] > left for name in seconds.keys() - set(chosen))
    assert [*slice_of(dict(reversed(seconds.items())), commit)] == chosen


def test_other_commits_run_other_tests() -> None:
    seconds = {f"test_{number}": 30.0 for number in range(30)}
    assert len({tuple(slice_of(seconds, str(commit))) for commit in range(20)}) > 10
