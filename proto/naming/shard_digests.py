"""The sha256 of a file's bytes, read once: kept in the user's cache until the file changes.

A kept digest counts for one device, inode, size, and times of last write and last change, so it is never taken for
other bytes of a file that was replaced or written, whoever set its time of last write back. Only this user could have
written it. Where nothing can be kept, every start reads all.
"""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path

SETTLED_SECONDS = 3.0
"""A file that changed later than so may change again without showing it: times of some file systems count seconds."""
MAX_KEPT_BYTES = 4096


def file_digest(path: Path) -> bytes:
    """Raises OSError, and ValueError for a file that changes meanwhile."""
    with path.open("rb") as file:
        before = identity(os.fstat(file.fileno()))
        kept_at = _kept_at(path)
        if (kept := _kept(kept_at, before)) is not None:
            return kept
        settled = time.time_ns() - max(before[3:]) > SETTLED_SECONDS * 1e9
        digest = hashlib.file_digest(file, "sha256").digest()
        if identity(os.fstat(file.fileno())) != before:
            raise ValueError(f"{path} changed while it was read")
    if settled and kept_at is not None:
        _keep(kept_at, before, digest)
    return digest


def identity(status: os.stat_result) -> list[int]:
    """What differs between a file and any other, and between a file before and after it was written."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _kept_at(path: Path) -> Path | None:
    """One file for each path, so that there are never more than files. None without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "blockyard" / "digests" / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()


def _kept(kept_at: Path | None, wanted: list[int]) -> bytes | None:
    if kept_at is None:
        return None
    try:
        with os.fdopen(os.open(kept_at, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                return None
            kept = json.loads(file.read(MAX_KEPT_BYTES))
        digest = bytes.fromhex(kept["sha256"]) if kept["identity"] == wanted else b""
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return digest if len(digest) == hashlib.sha256().digest_size else None


def _keep(kept_at: Path, of: list[int], digest: bytes) -> None:
    """Whole or not at all: others may read and write it meanwhile."""
    with contextlib.suppress(OSError):
        kept_at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=kept_at.parent)  # of mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"identity": of, "sha256": digest.hex()}, file)
            Path(name).replace(kept_at)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
