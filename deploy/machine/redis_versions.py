"""Redis and Valkey releases without known security holes, and detection of a server's release.

Owns the tables, which agree with supply_chain/advisories.json (a test checks it). A distribution may fix a hole and
keep the version (Debian does), so messages say "by its version".
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Version = tuple[int, ...]
OLDEST: Version = (6, 2)
"""The first version with the commands that the index needs."""
VERSION_SECONDS = 5.0
SOUND: dict[str, tuple[Version, ...]] = {
    "Redis": (
        *((6, 2, 24), (7, 2, 16), (7, 4, 11)),
        *((8, 2, 10), (8, 6, 7), (8, 8, 3), (8, 10, 2)),
    ),
    "Valkey": ((7, 2, 16), (8, 0, 13), (8, 1, 12), (9, 0, 8), (9, 1, 4)),
}
"""The first release without a known hole in each line of releases (8.2 is a line), oldest line first.

A line that is missing, such as 7.0, has no such release."""
SOUND_IF_PRIVATE: dict[str, tuple[Version, ...]] = {
    "Redis": ((6, 2, 24), (7, 2, 16), (7, 4, 11), (8, 2, 9), (8, 4, 6), (8, 6, 6), (8, 8, 2)),
    "Valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4), (9, 0, 0), (9, 1, 2)),
}
"""The same for a private server. Its settings and permissions close some holes (`private_redis` in
advisories.json). Holes in scripting count, because workers may load scripts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerVersion:
    """A server's product, "Redis" or "Valkey", and version."""

    product: str
    version: Version

    def __str__(self) -> str:
        return f"{self.product} {'.'.join(map(str, self.version))}"

    @property
    def warning(self) -> str:
        """Return a warning about this version's known security holes. Empty if it has none."""
        return self._warning(SOUND, "known security holes")

    @property
    def warning_if_private(self) -> str:
        """Return a warning about the known holes that a private server does not close. Empty if there are none."""
        reach = "within reach of programs on this machine or of a worker that was taken over"
        return self._warning(SOUND_IF_PRIVATE, f"known security holes {reach}")

    def _warning(self, table: dict[str, tuple[Version, ...]], holes: str) -> str:
        """Return a warning about `holes`, or an empty string if this version has none.

        It has none if it is not older than the first release that the table has of its line. In place of a missing
        line, the next one counts. A line newer than all in the table has no holes.
        """
        sound = next((first for first in table[self.product] if first[:2] >= self.version[:2]), None)
        if sound is None or self.version >= sound:
            return ""
        release = ServerVersion(product=self.product, version=sound)
        return f"{self} has, by its version, {holes}: the first release without them is {release}"


def version_of_reply(hello: Any) -> ServerVersion | None:
    """Parse the reply to HELLO. Return None if it is not from Redis or Valkey."""
    facts = _facts(hello)
    return _server(facts.get("server", ""), facts.get("version", ""))


def is_in_cluster_mode(hello: Any) -> bool:
    """Return True if the reply to HELLO is of a server of Redis Cluster."""
    return _facts(hello).get("mode") == "cluster"


def _facts(hello: Any) -> dict[str, str]:
    if isinstance(hello, list):  # RESP 2
        hello = dict(zip(hello[::2], hello[1::2], strict=False))
    if not isinstance(hello, dict):
        return {}
    return {_text(name): _text(value) for name, value in hello.items()}


def version_of_program(executable: Path) -> ServerVersion | None:
    """Run the program with `--version` and parse its output. Return None if that fails."""
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
