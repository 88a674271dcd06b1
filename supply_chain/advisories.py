"""The gate of known defects: fails where a part has one that advisories.json knows, unless an exception says why not.

    python -m supply_chain.advisories

Offline: what is known is in the file, with its date. A list or an exception past its date is a warning and no failure,
so that a commit that built once builds always. Owns the reading of the file and the judgement. The file's shape:
`affected` are ranges from `introduced` up to, without, `fixed`; a missing `fixed` means that there is none.
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
    """Why it does not reach the Redis that `up` starts; empty where it does, or where that is not known."""

    def affects(self, part: Part) -> bool:
        """False for a part whose version is not known: the report counts those."""
        is_named = (part.ecosystem, part.name) == (self.ecosystem, self.name)
        return is_named and bool(part.version) and any(comparable(part.version) in r for r in self.affected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excuse:
    """Why a part may have a defect: for one version of it, in one place."""

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
    """What the file says."""

    listed: date
    stale_after: timedelta
    advisories: tuple[Advisory, ...]
    exceptions: tuple[Excuse, ...]


def parse(text: str) -> Known:
    """Raises ValueError or KeyError where the file says less than it must."""
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
        f"{excuse.advisory}: the exception for {excuse.purl} fits no part that has the defect: take it out"
        for excuse in known.exceptions
        if excuse not in used
    ]
    return Verdict(failures=tuple(failures), warnings=tuple(_past(known, today)), excused=tuple(excused))


def _past(known: Known, today: date) -> Sequence[str]:
    late = [
        f"{excuse.advisory}: its exception was to be looked at again by {excuse.review_by}"
        for excuse in known.exceptions
        if excuse.review_by < today
    ]
    if today - known.listed > known.stale_after:
        late.append(f"advisories.json is of {known.listed}: look for newer advisories, and date it anew")
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
