"""Gate of known defects: fails if a part has a defect in advisories.json and no exception gives a reason.

    python -m supply_chain.advisories

Works offline: the file holds all known defects and its own date. A list or an exception past its date causes a warning
and no failure, so that a commit that built once always builds. Owns the reading of the file and the verdict.

In the file `affected` has ranges from `introduced` up to, and without, `fixed`. A missing `fixed` means that no release
fixes the defect.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from packaging.version import Version

from supply_chain.parts import Part, all_parts, comparable

ADVISORIES = Path(__file__).parent / "advisories.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    introduced: Version
    fixed: Version | None

    def __contains__(self, version: Version) -> bool:
        return self.introduced <= version and (self.fixed is None or version < self.fixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advisory:
    id: str
    ecosystem: str
    name: str
    affected: tuple[Range, ...]
    summary: str
    source: str
    private_redis: str = ""
    """Reason why it does not affect the Redis that `up` starts. Empty if it does, or if that is not known."""

    def affects(self, part: Part) -> bool:
        """Return False for a part of unknown version: the report counts those."""
        is_named = (part.ecosystem, part.name) == (self.ecosystem, self.name)
        return is_named and bool(part.version) and any(comparable(part.version) in r for r in self.affected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excuse:
    """Exception that allows one version of a part, in one place, to have a defect."""

    advisory: str
    purl: str
    inside: str
    decided: date
    review_by: date
    reason: str

    def covers(self, advisory: Advisory, part: Part) -> bool:
        return (self.advisory, self.purl, self.inside) == (advisory.id, part.purl, part.inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Content of advisories.json."""

    listed: date
    stale_after: timedelta
    advisories: tuple[Advisory, ...]
    exceptions: tuple[Excuse, ...]


def parse(text: str) -> Known:
    """Read advisories.json. Raises ValueError or KeyError if a required value is missing."""
    file = json.loads(text)
    return Known(
        listed=date.fromisoformat(file["date"]),
        stale_after=timedelta(days=file["stale_after_days"]),
        advisories=tuple(_advisory(row) for row in file["advisories"]),
        exceptions=tuple(_excuse(row) for row in file["exceptions"]),
    )


def _advisory(row: dict[str, Any]) -> Advisory:
    ranges = tuple(
        Range(
            introduced=comparable(known["introduced"]),
            fixed=comparable(known["fixed"]) if "fixed" in known else None,
        )
        for known in row["affected"]
    )
    if not ranges or not row["source"].startswith("https://"):
        raise ValueError(f"{row['id']} lacks ranges or a source")
    ecosystem, name = row["package"].split(":")
    return Advisory(
        id=row["id"],
        ecosystem=ecosystem,
        name=name,
        affected=ranges,
        summary=row["summary"],
        source=row["source"],
        private_redis=row.get("private_redis", ""),
    )


def _excuse(row: dict[str, Any]) -> Excuse:
    if len(row["reason"].split()) < 5:
        raise ValueError(f"the exception for {row['advisory']} gives no reason")
    dates = {name: date.fromisoformat(row[name]) for name in ("decided", "review_by")}
    return Excuse(
        advisory=row["advisory"], purl=row["purl"], inside=row["inside"], reason=row["reason"], **dates
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    failures: tuple[str, ...]
    warnings: tuple[str, ...]
    excused: tuple[str, ...]


def judge(parts: Iterable[Part], known: Known, today: date) -> Verdict:
    affected = [(advisory, part) for part in parts for advisory in known.advisories if advisory.affects(part)]
    used: set[Excuse] = set()
    failures: list[str] = []
    excused: list[str] = []
    for advisory, part in affected:
        excuses = [excuse for excuse in known.exceptions if excuse.covers(advisory, part)]
        used.update(excuses)
        (excused if excuses else failures).append(
            f"{advisory.id}: {part}: {advisory.summary} ({advisory.source})"
        )
    failures += [
        f"{excuse.advisory}: the exception for {excuse.purl} matches no part with the defect: remove it"
        for excuse in known.exceptions
        if excuse not in used
    ]
    return Verdict(failures=tuple(failures), warnings=tuple(_past(known, today)), excused=tuple(excused))


def _past(known: Known, today: date) -> Sequence[str]:
    late = [
        f"{excuse.advisory}: its exception was due for review by {excuse.review_by}"
        for excuse in known.exceptions
        if excuse.review_by < today
    ]
    if today - known.listed > known.stale_after:
        late.append(f"advisories.json is of {known.listed}: look for newer advisories and update its date")
    return late


def main() -> None:
    parts = all_parts()
    known = parse(ADVISORIES.read_text(encoding="utf-8"))
    verdict = judge(parts, known, date.today())
    silent = sum(not part.version for part in parts)
    print(
        f"known defects as of {known.listed}: {len(known.advisories)} advisories, {len(parts)} parts "
        f"({silent} of unknown version), {len(verdict.excused)} excused, {len(verdict.failures)} not"
    )
    for warning in verdict.warnings:
        print(f"WARNING: {warning}", file=sys.stderr)
    if verdict.failures:
        sys.exit("\n".join(verdict.failures))


if __name__ == "__main__":
    main()
