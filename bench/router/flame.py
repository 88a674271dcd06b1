"""Profile of a router's Python code under load: py-spy's flame graph, and shares of functions in numbers.

Owns calling py-spy, and parsing its folded stacks. `entitled` and `shares` are pure.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

RATE = 200
"""Samples per second."""
Form = Literal["flamegraph", "raw"]
"""Output format: an SVG picture, or one line per stack."""


class FlameError(RuntimeError):
    """py-spy could not sample the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of all samples in which Python ran, by function "name (file)"."""

    own: dict[str, float]
    """Share in the function itself, or in C code that it called."""
    total: dict[str, float]
    """Share in the function and the functions that it called."""


async def record(py_spy: Path, pid: int, seconds: float, form: Form, output: Path) -> None:
    """Run py-spy on a process. Raise FlameError with its message."""
    process = await asyncio.create_subprocess_exec(
        *(str(py_spy), "record", "--pid", str(pid), "--duration", str(round(seconds)), "--rate", str(RATE)),
        *("--function", "--format", form, "--output", str(output)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise FlameError(errors.decode(errors="replace").strip()[-500:])


def entitled(picture: str, title: str) -> str:
    """Replace the title of an SVG, which is py-spy's command line."""
    return re.sub(r'(<text id="title"[^>]*>)[^<]*', lambda found: found[1] + title, picture)


def entitle(path: Path, title: str) -> None:
    path.write_text(entitled(path.read_text(encoding="utf-8"), title), encoding="utf-8")


def shares(folded: Iterable[str]) -> Shares:
    """Compute the shares from lines "outer;...;inner count"."""
    own, total = Counter[str](), Counter[str]()
    for line in folded:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        own[frames[-1]] += int(count)
        for frame in set(frames):
            total[frame] += int(count)
    samples = own.total() or 1
    return Shares(
        own={frame: count / samples for frame, count in own.most_common()},
        total={frame: count / samples for frame, count in total.most_common()},
    )
