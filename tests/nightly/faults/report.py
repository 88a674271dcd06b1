"""The table of bench/reports/faults.md: every row of the matrix with the figures of a run.

A pytest plugin that conftest.py registers. Owns the lines between the two markers of that file, nothing else in it.
"""

import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path
from typing import Any

import pytest

from .matrix import MATRIX

WRITER = "make faults"
HEAD = (
    "| n | fault | expected | measured: failed / migrated / recovery | test |",
    "|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one test of one row."""

    number: int
    test: str
    outcome: str
    """passed, failed, skipped or xfailed."""
    reason: str = ""
    """Reason why it was skipped, or is known to fail."""
    failed: int | None = None
    migrated: int | None = None
    recovery_seconds: float | None = None
    note: str = ""

    @property
    def told(self) -> str:
        if self.outcome == "xfailed":
            return f"**does not hold**: {self.reason}"
        if self.outcome == "skipped":
            return f"not run: {self.reason}"
        if self.outcome == "failed":
            return "**does not hold**"
        figures = (self.failed, self.migrated, self.recovery_seconds)
        if figures == (None, None, None):
            return self.note or "holds"
        recovery = "-" if self.recovery_seconds is None else f"{self.recovery_seconds:.2f} s"
        shown = " / ".join(["-" if count is None else str(count) for count in figures[:2]] + [recovery])
        return f"{shown}; {self.note}" if self.note else shown


def table(outcomes: Iterable[Outcome]) -> list[str]:
    by_number: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        by_number.setdefault(outcome.number, []).append(outcome)
    lines = list(HEAD)
    for fault in MATRIX:
        found = by_number.get(fault.number, [])
        told = "<br>".join(outcome.told for outcome in found) or "not run"
        tests = "<br>".join(f"`{outcome.test}`" for outcome in found) or "-"
        lines.append(f"| {fault.number} | {fault.fault} | {fault.expected} | {told} | {tests} |")
    return lines


def rewritten(text: str, lines: Sequence[str], *, by: str = WRITER) -> str:
    """Replace the lines between this writer's two markers. Raises ValueError if they are missing."""
    before, begin, rest = text.partition(f"<!-- written by {by}: begin -->")
    _, end, after = rest.partition(f"<!-- written by {by}: end -->")
    if not begin or not end:
        raise ValueError("the file has no place for the table: its two markers are missing")
    return "\n".join([before + begin, "", *lines, "", end + after])


def setting() -> str:
    """Return when and where the run took place, in a sentence."""
    return f"Run of {day_and_commit()} on {machine()}."


def day_and_commit() -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=9"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return f"{day} at commit `{commit or 'unknown'}`"


def machine() -> str:
    system = f"{platform.system()} {platform.machine()}"
    return f"{cpu_count()} cores, {system}, Python {platform.python_version()}"


class FaultReport:
    """Collects what the tests of a session measured, and writes it to `path` at its end."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.outcomes: list[Outcome] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        for mark in item.iter_markers("fault"):
            item.user_properties.append(("fault", mark.args[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        properties = [entry for entry in report.user_properties if entry[0] == "fault"]
        measured: dict[str, Any] = dict(report.user_properties).get("measured", {})
        for _, number in properties:
            self.outcomes.append(
                Outcome(
                    number=number,
                    test=report.nodeid.rpartition("/")[2],
                    outcome="xfailed" if _known_failure(report) else report.outcome,
                    reason=_known_failure(report) or _skip_reason(report),
                    **measured,
                )
            )

    def pytest_sessionfinish(self) -> None:
        if self._path is not None:
            lines = [setting(), "", *table(self.outcomes)]
            self._path.write_text(rewritten(self._path.read_text(), lines))


def _known_failure(report: pytest.TestReport) -> str:
    return getattr(report, "wasxfail", "").removeprefix("reason: ")


def _skip_reason(report: pytest.TestReport) -> str:
    if report.outcome != "skipped" or not isinstance(report.longrepr, tuple):
        return ""
    return str(report.longrepr[2]).removeprefix("Skipped: ")
