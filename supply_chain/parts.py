"""Third-party parts: packages of the lock, what their wheels bundle, and images of the manifests. Only reads files.

Owns what a part is. Does not own how the bundled ones are found (bundled.py) or what is known of them (advisories.py).
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from supply_chain.lock import DEVELOPMENT, LOCK, ROOT

BUNDLED = Path(__file__).parent / "bundled.json"
DOCKERFILE, MANIFESTS = ROOT / "deploy" / "Dockerfile", ROOT / "deploy" / "kuberay"
IMAGE = re.compile(r"(?:image:|PYTHON_IMAGE=)\s*(?P<name>redis|valkey/valkey|python):(?P<version>\d[\d.]*)")
"""Third-party images. Ours are built from the lock."""
RELEASE = re.compile(r"\d+(?:\.\d+)*")
IN_THE_IMAGE = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.14",
    "python_version": "3.11",
    "sys_platform": "linux",
}
"""Environment for markers: the platform of deploy/Dockerfile."""

Ecosystem = Literal["pypi", "maven", "generic"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Part:
    ecosystem: Ecosystem
    name: str
    """Name of the package; `group/artifact` for Maven."""
    version: str = ""
    """Version, empty if the binary does not have it."""
    inside: str = ""
    """The wheel that bundles it, or the manifest that names it."""
    is_shipped: bool = True
    """False if only development uses it."""

    @property
    def purl(self) -> str:
        return f"pkg:{self.ecosystem}/{self.name}" + (f"@{self.version}" if self.version else "")

    def __str__(self) -> str:
        return f"{self.name} {self.version or '?'}" + (f" in {self.inside}" if self.inside else "")


def comparable(version: str) -> Version:
    """Parse a version, without Maven's qualifiers such as in `32.0.1-jre`. Raises ValueError."""
    try:
        return Version(version)
    except InvalidVersion:
        release = RELEASE.match(version)
        if release is None:
            raise ValueError(f"{version!r} is no version") from None
        return Version(release[0])


def locked(text: str) -> list[Part]:
    """Return the packages of a lock whose markers match the platform of the image."""
    product, _, development = text.partition(DEVELOPMENT)
    return [
        Part(ecosystem="pypi", name=name, version=version, is_shipped=is_shipped)
        for section, is_shipped in ((product, True), (development, False))
        for name, version in _pins(section.splitlines())
    ]


def _pins(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        if not line or line[0] == "#":
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(IN_THE_IMAGE):
            (pin,) = requirement.specifier
            yield canonicalize_name(requirement.name), pin.version


def bundled(text: str) -> list[Part]:
    return [
        Part(
            ecosystem=row["ecosystem"],
            name=row["name"],
            version=row["version"],
            inside=f"{wheel['name']} {wheel['version']}",
        )
        for wheel in json.loads(text)["wheels"]
        for row in wheel["parts"]
    ]


def in_images(texts: Iterable[tuple[str, str]]) -> list[Part]:
    """Return the third-party images in files, given as pairs of name and text."""
    found = {
        Part(
            ecosystem="generic", name=match["name"].rpartition("/")[2], version=match["version"], inside=file
        )
        for file, text in texts
        for match in IMAGE.finditer(text)
    }
    return sorted(found)


def all_parts() -> list[Part]:
    """Return all parts, sorted."""
    files = [DOCKERFILE, *sorted(MANIFESTS.rglob("*.yaml"))]
    texts = [(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")) for file in files]
    return sorted(
        {
            *locked(LOCK.read_text(encoding="utf-8")),
            *bundled(BUNDLED.read_text(encoding="utf-8")),
            *in_images(texts),
        }
    )


def wrong_wheels(lock: Iterable[Part], known: Iterable[Part]) -> list[str]:
    """Return wheels whose bundled parts are listed for another version than that of the lock."""
    pinned = {part.name: part.version for part in lock}
    listed = {tuple(part.inside.split(" ")) for part in known}
    return sorted(f"{name} {version}" for name, version in listed if pinned.get(name) != version)
