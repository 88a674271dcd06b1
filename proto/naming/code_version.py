"""The version of the running code: the package's version and a hash of its sources. A wheel and an editable install
have the same.

Owns what counts as a source. Each serving process reports its version. deploy/ compares those of the processes that it
starts, and a router those of its workers.
"""

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("proto", "kernels", "worker", "router", "deploy")
_HASH_DIGITS = 12
_SUFFIXES = (".py", ".cpp", ".h", ".lua")


def package_folders() -> dict[str, Path]:
    """Return the folder of each package, by its name. Raises ImportError if one is not installed."""
    folders = {}
    for name in PACKAGES:
        spec = find_spec(f"blockyard.{name}")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"blockyard.{name} is not installed")
        folders[name] = Path(spec.submodule_search_locations[0])
    return folders


def code_version() -> str:
    """Return the version and a hash of all sources, such as "0.1.0+3fa9c1d2e0ab"."""
    # A shipped wheel already has the hash in its version.
    released = version("blockyard").partition("+")[0]
    return f"{released}+{sources_hash()}"


def sources_hash(*folders: str) -> str:
    """Return a hash of the sources in these folders, such as "worker/model". Without any, all sources count."""
    digest = hashlib.sha256()
    for name, path in _sources():
        if folders and not name.startswith(tuple(f"{folder}/" for folder in folders)):
            continue
        text = path.read_bytes()
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()[:_HASH_DIGITS]


def _sources() -> Iterator[tuple[str, Path]]:
    for package, folder in package_folders().items():
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES):
            yield f"{package}/{path.relative_to(folder).as_posix()}", path
