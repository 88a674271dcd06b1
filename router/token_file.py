"""The file of tokens: read at start, watched while the router runs.

Owns who else may read the file and what becomes of a bad one: at the start an error, later the tokens before it stand.
Does not own what is in it (auth.py).
"""

import asyncio
import logging
import os
from pathlib import Path

from blockyard.proto.secret_files import read_secret_file
from blockyard.router.auth import TokenTable, parse_tokens

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0

_Version = tuple[int, int, int]
"""What changes with a file's contents: inode, size, time of the last change in ns."""


class TokenFile:
    """`tokens` is what was last found good. Raises ValueError for a file that cannot be used."""

    def __init__(self, path: str | Path, *, page_token_sha256: str | None = None) -> None:
        """`page_token_sha256` is of a token that is known beside the file's."""
        self._path = Path(path)
        self._page_token_sha256 = page_token_sha256
        self.tokens, self._version = _read(self._path, page_token_sha256)
        self._complaint = ""

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Takes what has changed. A file that has gone or is bad leaves everything as it is, and is told once."""
        try:
            if _version(self._path.stat()) == self._version:
                return
            self.tokens, self._version = _read(self._path, self._page_token_sha256)
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:
                logger.error("the tokens stay as they were: %s", error)
            self._complaint = str(error)
        else:
            self._complaint = ""
            logger.info("%d tokens are known now", len(self.tokens))


def _read(path: Path, page_token_sha256: str | None) -> tuple[TokenTable, _Version]:
    content, status = read_secret_file(path, "auth file")
    try:
        text = content.decode("utf-8")
        return parse_tokens(text, page_token_sha256=page_token_sha256), _version(status)
    except UnicodeDecodeError:
        raise ValueError(f"auth file {path}: it is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"auth file {path}: {error}") from None


def _version(status: os.stat_result) -> _Version:
    return status.st_ino, status.st_size, status.st_mtime_ns
