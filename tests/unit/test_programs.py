"""Where CI has installed the programs that tests need, a test without its program fails and is not skipped."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import REQUIRE_VARIABLE, first_of

ROOT = Path(__file__).parents[2]
SECONDS = 120.0


def test_a_missing_program_skips_a_test_unless_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRE_VARIABLE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no such-a-browser on the PATH: a page is looked at"):
        first_of("such-a-browser", why="a page is looked at")
    monkeypatch.setenv(REQUIRE_VARIABLE, "1")
    with pytest.raises(pytest.fail.Exception, match="no such-a-browser on the PATH: a page is looked at"):
        first_of("such-a-browser", why="a page is looked at")
    assert first_of("such-a-browser", "sh", why="") == first_of("sh", why="")


@pytest.mark.parametrize(("required", "code"), [("0", 0), ("1", 1)])
def test_what_needs_prometheus_fails_without_it_only_where_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: str, code: int
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(REQUIRE_VARIABLE, required)
    needs_it = "tests/unit/metrics/test_alerts.py::test_rules_and_scrape_configuration_are_valid"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", needs_it]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert result.returncode == code, result.stdout
