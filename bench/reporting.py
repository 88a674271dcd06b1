"""A dated report of a benchmark: Markdown for people, and the same numbers as JSON beside it.

The JSON twin holds `figures` (every number), `floors` (what must hold: name, value, floor, and which side is better)
and what was measured on what.
"""

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from math import ceil
from pathlib import Path
from typing import Any, Literal

from blockyard.deploy.bench.machine import machine

REPORTS = Path(__file__).parent / "reports"


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    name: str
    value: float
    floor: float
    better: Literal["higher", "lower"]

    @property
    def holds(self) -> bool:
        return self.value >= self.floor if self.better == "higher" else self.value <= self.floor


def write_report(
    name: str,
    *,
    title: str,
    text: str,
    figures: Mapping[str, Any],
    floors: Sequence[Floor],
    versions: Mapping[str, str],
    folder: Path = REPORTS,
) -> Path:
    """Writes `<today>-<name>.md` and `.json`. Where the Markdown lies."""
    setting = {**machine(), "commit": commit(), "versions": {"python": platform.python_version(), **versions}}
    document = {
        "name": name,
        "date": date.today().isoformat(),
        **setting,
        "figures": dict(figures),
        "floors": [asdict(floor) for floor in floors],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['date']}-{name}.md"
    path.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    versions_text = ", ".join(f"{package} {version}" for package, version in setting["versions"].items())
    lines = [
        f"# {title}",
        "",
        f"{document['date']}, commit {setting['commit']}, {setting['cpu']}, {setting['cores']} cores, {versions_text}.",
        "",
        text.strip(),
        "",
        "| floor | value | must be | holds |",
        "|---|---|---|---|",
        *(
            f"| {floor.name} | {floor.value:.3g} | {'>=' if floor.better == 'higher' else '<='} {floor.floor:g} "
            f"| {'yes' if floor.holds else 'NO'} |"
            for floor in floors
        ),
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that so large a share of them does not pass."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def commit() -> str:
    """With `+` where files differ from it."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()
