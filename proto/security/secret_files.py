"""Files that an operator gives and that only the operator should read: tokens, private keys.

Owns the refusal of files that everybody may read. Does not own their content.
"""

import os
import stat
from pathlib import Path

MAX_BYTES = 4 * 1024 * 1024


def read_file(path: str | Path, what: str) -> bytes:
    """Return a file's content. Raises ValueError, which names `what` and the file, if it cannot be read or is too
    large."""
    return _read(Path(path), what)[0]


def read_secret_file(path: str | Path, what: str) -> tuple[bytes, os.stat_result]:
    """Return the content of a secret file and its state at that time.

    Raises ValueError that names `what` and the file. It also does so for a file that everybody may read or others than
    its owner may change. It refuses anything but a regular file, because a pipe never ends.
    """
    content, status = _read(Path(path), what, flags=os.O_NONBLOCK)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{what} {path} is no regular file")
    if status.st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ValueError(
            f"{what} {path} may be read by everybody or changed by others than its owner "
            f"(mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 it, or 640 for a group that reads it"
        )
    return content, status


def _read(path: Path, what: str, *, flags: int = 0) -> tuple[bytes, os.stat_result]:
    try:
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"{what} {path} has more than {MAX_BYTES} bytes")
    return content, status
