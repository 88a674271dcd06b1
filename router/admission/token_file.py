"""The file of tokens: read at start, watched while the router runs.

Owns who else may read the file and what becomes of a bad one: at the start an error, later the end of all its tokens,
unless it is mended within GRACE_SECONDS. So whoever deletes the file, or spoils it, revokes everybody; an editor that
writes it in two parts revokes nobody. Does not own what is in it (token_entries.py).
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.security.secret_files import read_secret_file
from blockyard.router.admission.auth import TokenTable
from blockyard.router.admission.token_entries import nobody, parse_tokens

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
GRACE_SECONDS = 10.0
"""From the first look that finds no good file to the end of the tokens that were known before it."""

_Version = tuple[int, ...]
"""What changes with a file's contents or with who may read it: inode, size, mode, owner, times of the last changes."""


class TokenFile:
    """`tokens` is what is good now. Raises ValueError for a file that cannot be used."""

    def __init__(
        self,
        path: str | Path,
        *,
        page_token_sha256: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`page_token_sha256` is of a token that is known beside the file's."""
        self._path = Path(path)
        self._page_token_sha256 = page_token_sha256
        self._clock = clock
        self.tokens, self._version = _read(self._path, page_token_sha256)
        self._complaint = ""
        self._bad_since: float | None = None
        """When the file was first found bad; None while it is good."""

    async def follow(self) -> None:
        """Looks again and again. A look that hangs, as on a lost file server, is a bad file."""
        look: asyncio.Task[TokenTable | str | None] | None = None
        async with BackgroundTasks(on_failure=None) as tasks:
            while True:
                await asyncio.sleep(POLL_SECONDS)
                look = look or tasks.start(asyncio.to_thread(self._look), name="auth file")
                await asyncio.wait({look}, timeout=POLL_SECONDS)
                if look.done():
                    self._take(look.result())
                    look = None
                else:
                    self._take(f"auth file {self._path} cannot be read: it takes too long")

    def refresh(self) -> None:
        """Takes what has changed."""
        self._take(self._look())

    def _look(self) -> TokenTable | str | None:
        """What is new: tokens, or what is wrong with the file."""
        try:
            if self._bad_since is None and _version(self._path.stat()) == self._version:
                return None
            tokens, self._version = _read(self._path, self._page_token_sha256)
        except ValueError as error:
            return str(error)
        except OSError as error:
            return f"auth file {self._path} cannot be read: {error.strerror}"
        return tokens

    def _take(self, news: TokenTable | str | None) -> None:
        match news:
            case None:
                pass
            case TokenTable():
                self.tokens, self._bad_since, self._complaint = news, None, ""
                logger.info("%d tokens are known now", len(news))
            case str():
                self._take_complaint(news)

    def _take_complaint(self, complaint: str) -> None:
        now = self._clock()
        if self._bad_since is None:
            self._bad_since = now
        has_grace = now - self._bad_since < GRACE_SECONDS
        told = (
            f"{complaint}: {'its tokens end soon unless it is mended' if has_grace else 'no token is good'}"
        )
        if told != self._complaint:
            logger.error("%s", told)
        self._complaint = told
        if not has_grace:
            self.tokens = nobody(self._page_token_sha256)


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
    changed = status.st_mtime_ns, status.st_ctime_ns
    return status.st_ino, status.st_size, status.st_mode, status.st_uid, status.st_gid, *changed
