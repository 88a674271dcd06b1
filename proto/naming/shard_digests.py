"""Digests (sha256) of files, read once and kept in the user's cache until the file changes.

A kept digest counts for one device, inode and size, and for one pair of times: last write and last change. So it is
never taken for other bytes of a file that was replaced or written, even if its time of last write was set back. Only
this user can have written it. If nothing can be kept, every start reads all files.
"""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path

STABLE_SECONDS = 3.0
"""A file that changed less than this ago may change again unseen, because some file systems count whole seconds."""
MAX_KEPT_BYTES = 4096


def file_digest(path: Path) -> bytes:
    """Return the sha256 of a file: the kept one if it is still valid, else computed and kept. Raises OSError, and
    ValueError for a file that changes meanwhile."""
    with path.open("rb") as file:
        before = identity(os.fstat(file.fileno()))
        kept_at = _kept_at(path)
        if (kept := _kept(kept_at, before)) is not None:
            return kept
        is_stable = time.time_ns() - max(before[3:]) > STABLE_SECONDS * 1e9
        digest = hashlib.file_digest(file, "sha256").digest()
        if identity(os.fstat(file.fileno())) != before:
            raise ValueError(f"{path} changed while it was read")
    if is_stable and kept_at is not None:
        _keep(kept_at, before, digest)
    return digest


def identity(status: os.stat_result) -> list[int]:
    """Return numbers that differ between any two files, and between one file before and after a write."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _kept_at(path: Path) -> Path | None:
    """Return the path where a file's digest is kept. Each file has one, so there are never more digests than files.
    None without a home."""
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
    """Keep a digest atomically, because other processes may read and write it meanwhile."""
    with contextlib.suppress(OSError):
        kept_at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=kept_at.parent)  # has mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"identity": of, "sha256": digest.hex()}, file)
            Path(name).replace(kept_at)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
