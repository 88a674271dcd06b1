"""Which versions of Redis and Valkey have holes that whoever may log in can use, and which version a server is.

Owns the list, which is of 2026-11: a server that is not in it may have others. A distribution may mend a hole and keep
the version (Debian does), so what is said here is said "by its version".
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Version = tuple[int, ...]
OLDEST: Version = (6, 2)
"""That has what the index needs."""
VERSION_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """What it lets be done, and the first version of each line that has it mended."""

    name: str
    told: str
    mended: dict[str, tuple[Version, ...]]


HOLES = (
    Hole(
        name="CVE-2025-49844",
        told="a Lua script may run any code on the server",
        mended={
            "Redis": ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
            "Valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4)),
        },
    ),
    Hole(
        name="the holes mended in July 2026",
        told="users who may RESTORE keys can run any code on the server",
        mended={
            "Redis": (
                *((6, 2, 23), (7, 2, 15), (7, 4, 10)),
                *((8, 2, 8), (8, 4, 5), (8, 6, 5), (8, 8, 1)),
            ),
            "Valkey": ((7, 2, 14), (8, 0, 10), (8, 1, 9), (9, 0, 5), (9, 1, 1)),
        },
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerVersion:
    """A server's product, "Redis" or "Valkey", and version."""

    product: str
    version: Version

    def __str__(self) -> str:
        return f"{self.product} {'.'.join(map(str, self.version))}"

    @property
    def holes(self) -> tuple[Hole, ...]:
        return tuple(hole for hole in HOLES if self._has(hole))

    def _has(self, hole: Hole) -> bool:
        """A line without a mended version, such as 7.0, has the hole unless it is newer than all that have one."""
        mended = hole.mended.get(self.product, ())
        in_line = [fixed for fixed in mended if fixed[:2] == self.version[:2]]
        return self.version < (in_line or [max(mended, default=())])[0]

    @property
    def told(self) -> str:
        """What is known to be wrong with it; empty if nothing is."""
        if not (holes := self.holes):
            return ""
        worst = "; ".join(f"{hole.name}: {hole.told}" for hole in holes)
        return f"{self} has, by its version, known holes ({worst})"


def version_of_reply(hello: Any) -> ServerVersion | None:
    """Out of what HELLO answers; None where it is nothing that a Redis or a Valkey says."""
    if isinstance(hello, list):  # RESP 2
        hello = dict(zip(hello[::2], hello[1::2], strict=False))
    if not isinstance(hello, dict):
        return None
    facts = {_text(name): _text(value) for name, value in hello.items()}
    return _server(facts.get("server", ""), facts.get("version", ""))


def version_of_program(executable: Path) -> ServerVersion | None:
    """By `--version`."""
    try:
        said = subprocess.run(
            [str(executable), "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS
        ).stdout
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    found = re.match(r"(Redis|Valkey) server v=(\S+)", said)
    return None if found is None else _server(*found.groups())


def _server(product: str, version: str) -> ServerVersion | None:
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", version)
    known = {"redis": "Redis", "valkey": "Valkey"}.get(product.lower())
    if numbers is None or known is None:
        return None
    return ServerVersion(product=known, version=tuple(int(part or 0) for part in numbers.groups()))


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
