"""Token with which the live page calls routers, on a cluster that `up` starts with an auth file.

`up` draws it at random and prints it nowhere. Owns the token's file, which lies in the cluster's folder until `down`.
Only the user who ran `up` can read it. Routers get only the token's sha256, in addition to their auth file. The
dashboard finds the file through the environment of its Ray head.
"""

import os
from hashlib import sha256
from pathlib import Path

from blockyard.router.admission.auth import LIVE_PAGE
from blockyard.router.admission.token_entries import new_token

FILE_NAME = "page-token"


def draw_page_token(directory: Path) -> Path:
    """Draw a random token, write it to a new file in the cluster's folder, and return the file's path."""
    token, _ = new_token(LIVE_PAGE.name, LIVE_PAGE.role)
    path = directory / FILE_NAME
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token)
    return path


def page_token_sha256(directory: str | None) -> str | None:
    """Return the sha256 of the token in a cluster's folder, for routers. None if no token was drawn."""
    path = Path(directory or "") / FILE_NAME
    if directory is None or not path.exists():
        return None
    return sha256(path.read_bytes()).hexdigest()
