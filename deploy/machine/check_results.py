"""Findings of `doctor` and `up --dry-run`: ok, warn (serves, but not as well as it could) or fail (cannot serve)."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a report by `doctor` or `up --dry-run`: the verdict of one check."""

    verdict: Verdict
    subject: str
    detail: str


def exit_code(findings: list[Finding]) -> int:
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0
