"""The live page's own token, on a cluster that `up` starts with an auth file: drawn by `up`, known to nobody else.

Owns the file, which only its owner reads, and lies in the cluster's folder until `down`. Routers get its sha256 alone,
beside their auth file; the dashboard finds it by the environment of its head.
"""

import os
from hashlib import sha256
from pathlib import Path

from blockyard.router.admission.auth import LIVE_PAGE
from blockyard.router.admission.token_entries import new_token

FILE_NAME = "page-token"


def draw_page_token(directory: Path) -> Path:
    """The file that has it."""
    token, _ = new_token(LIVE_PAGE.name, LIVE_PAGE.role)
    path = directory / FILE_NAME
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token)
    return path


def page_token_sha256(directory: str | None) -> str | None:
    """What routers know it by; None where none was drawn."""
    path = Path(directory or "") / FILE_NAME
    if directory is None or not path.exists():
        return None
    return sha256(path.read_bytes()).hexdigest()
