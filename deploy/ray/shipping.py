"""The installed package as a wheel, to be given to nodes that have another copy of it or none.

Owns how it is packed, from a wheel's install or an editable one, without any build tool. Ray takes it to the nodes
(`py_modules`) and installs it beside what is there, for our actors alone. The wheel names no dependencies: nodes have
them, or `doctor --address` says what they lack. Its version ends with the hash of the code, because Ray takes two
wheels of one name for the same.
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
    """A wheel, for as long as it takes to give it to Ray."""
    with tempfile.TemporaryDirectory(prefix="by-wheel-") as folder:
        yield build_wheel(Path(folder))


def build_wheel(folder: Path) -> Path:
    """Written into `folder`; its name says what is in it."""
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
    """All that the package has, its data too, but for what Python and editors leave behind."""
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
