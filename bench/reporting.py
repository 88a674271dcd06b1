"""Dated reports of benchmarks: Markdown for people, and a JSON twin with the same numbers.

The JSON holds `figures` (every number) and `floors` (name, value, bound, and which side is better). It also holds the
command, the machine and the commit, and why the figures are unproven, if they are.
"""

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path, PurePath
from typing import Any, Literal

from blockyard.deploy.bench.machine import machine

REPORTS = Path(__file__).parent / "reports"
ABSOLUTE_PATH = re.compile(r"(^|[=,])(/[^,]*)")
"""An absolute path: a whole word, or the part of one after `--option=` or a comma."""


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
    unproven: str = "",
    is_cut_short: bool = False,
) -> Path:
    """Write `<today>-<name>.md` and `.json`. Return the path of the Markdown.

    `unproven` says why the tests of the subject did not pass before. Both files say so first. Neither such a report nor
    one that is cut short replaces a complete, proven one of the same day: they have other names.
    """
    name += f"{'-cut-short' if is_cut_short else ''}{'-unproven' if unproven else ''}"
    setting = {
        **machine(),
        "gpu": gpu(),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **versions},
    }
    document = {
        "name": name,
        "unproven": unproven or None,
        "date": date.today().isoformat(),
        "command": command_line(_program(), sys.argv[1:]),
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
        *([f"**UNPROVEN: {unproven}.**", ""] if unproven else []),
        f"{origin(document)}, {versions_text}.",
        "",
        "```bash",
        document["command"],
        "```",
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


def command_line(program: Sequence[str], words: Sequence[str]) -> str:
    """Return the command line with each absolute path cut to its last part, because reports are public."""
    return shlex.join(["python", *program, *(ABSOLUTE_PATH.sub(_last_part, word) for word in words)])


def _last_part(path: re.Match[str]) -> str:
    return f"{path[1]}.../{PurePath(path[2]).name}"


def _program() -> list[str]:
    """Return the arguments with which Python was started: a module or a file."""
    spec = sys.modules["__main__"].__spec__
    return [PurePath(sys.argv[0]).name] if spec is None else ["-m", spec.name.removesuffix(".__main__")]


def gpu() -> dict[str, Any] | None:
    """Describe the first GPU that torch sees. None without a GPU or without torch."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return {
        "name": torch.cuda.get_device_name(0),
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def origin(document: Mapping[str, Any]) -> str:
    """Return the date, commit and machine of a report's numbers."""
    return f"{document['date']}, commit {document['commit']}, {machine_text(document)}"


def machine_text(setting: Mapping[str, Any]) -> str:
    """Format `machine()` and `gpu()`. The oldest reports have only the CPU's name and number of cores."""
    numbers = [f"{name} {number}" for name, number in setting.get("cpu_numbers", {}).items()]
    features = "; ".join(", ".join(part) for part in (numbers, setting.get("vector_units", ())) if part)
    text = f"{setting['cpu']}{f' ({features})' if features else ''}, {setting['cores']} cores"
    gpu = setting.get("gpu")
    if gpu is None:
        return text
    return f"{text}, {gpu['count']} x {gpu['name']} (CUDA {gpu['cuda']}, triton {gpu['triton']})"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not less than this share of all values (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def commit() -> str:
    """Return the commit's short hash, with `+` if tracked files differ from it."""
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
