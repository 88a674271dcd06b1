"""Shipping: packs the installed package as a wheel, for nodes that have another copy of it or none.

Owns how it is packed, from an installed wheel or an editable install, without any build tool. Ray copies it to the
nodes (`py_modules`) and installs it for our actors alone. The wheel lists no dependencies: nodes have them, or
`doctor --address` says what they lack. Its version ends with the hash of the code, because Ray treats wheels of the
same name as equal.
"""

import base64
import contextlib
import hashlib
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from blockyard.proto.naming.code_version import code_version, package_folders

_LEFT_OUT = frozenset({"__pycache__", "node_modules"})
_WHEEL = "Wheel-Version: 1.0\nGenerator: blockyard\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@contextlib.contextmanager
def shipped() -> Iterator[Path]:
    """Build a wheel to give to Ray, yield its path, and delete it after the block."""
    with tempfile.TemporaryDirectory(prefix="by-wheel-") as folder:
        yield build_wheel(Path(folder))


def build_wheel(folder: Path) -> Path:
    """Write the wheel into `folder` and return its path. Its name contains the code version."""
    version = code_version()
    about = f"blockyard-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: blockyard\nVersion: {version}\n"
    wheel = folder / f"blockyard-{version}-py3-none-any.whl"
    record: list[str] = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in _files():
            _add(archive, record, name, path.read_bytes())
        _add(archive, record, f"{about}/METADATA", metadata.encode())
        _add(archive, record, f"{about}/WHEEL", _WHEEL.encode())
        archive.writestr(f"{about}/RECORD", "\n".join([*record, f"{about}/RECORD,,", ""]))
    return wheel


def _files() -> Iterator[tuple[str, Path]]:
    """Yield all files of the package, with its data, but without caches and hidden files."""
    for package, folder in package_folders().items():
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            hidden = any(part.startswith(".") or part in _LEFT_OUT for part in inside.parts)
            if path.is_file() and not hidden:
                yield f"blockyard/{package}/{inside.as_posix()}", path


def _add(archive: zipfile.ZipFile, record: list[str], name: str, content: bytes) -> None:
    archive.writestr(name, content)
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    record.append(f"{name},sha256={digest},{len(content)}")
