"""Auth file: read at start and watched while the router runs.

Owns the check of the file's permissions, and what happens if the file is bad. At start that is an error. Later all its
tokens end, unless the file is good again within GRACE_SECONDS. So deleting or breaking the file revokes all tokens, and
an editor that writes it in two parts revokes none. The last good tokens are kept apart, so that their callers learn
that the file is at fault and not their token. Does not own the file's contents (token_entries.py).
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from blockyard.proto.runtime.tasks import in_own_thread
from blockyard.proto.security.secret_files import read_secret_file
from blockyard.router.admission.auth import TokenTable
from blockyard.router.admission.token_entries import no_tokens, parse_tokens

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
GRACE_SECONDS = 10.0
"""Time from the first check that finds a bad file to the end of the tokens known before."""

STILL_SECONDS = 1.0
"""A wait that ends later than this has found the router itself late, not the file."""

_Version = tuple[int, ...]
"""Attributes that change with the file's contents or permissions: inode, size, mode, owner, and times of change."""


class TokenFile:
    """Reads the auth file and watches it. `tokens` are those that are valid now.

    Raises ValueError for a file that cannot be used at the start.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        page_token_sha256: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`page_token_sha256` adds the live page's token, which is not in the file."""
        self._path = Path(path)
        self._page_token_sha256 = page_token_sha256
        self._clock = clock
        self.tokens, self._version = _read(self._path, page_token_sha256)
        self.suspended: TokenTable | None = None
        """Tokens that are not valid only because the file is bad. None: the file is good, or was until just now."""
        self._complaint = ""
        self._bad_since: float | None = None
        """When the file was first found bad. None while it is good."""

    @property
    def is_good(self) -> bool:
        """Return False from the first check that finds the file bad until one finds it good."""
        return self._bad_since is None

    async def follow(self) -> None:
        """Check the file at intervals until cancelled.

        A check that hangs, for example on a lost file server, counts as a bad file. Time in which the router itself
        stands still counts for nothing: the check may have stood still too.
        """
        check: asyncio.Future[TokenTable | str | None] | None = None
        while True:
            late_seconds = await _lateness(asyncio.sleep(POLL_SECONDS))
            # Of its own, so that nothing that clients make the router read or write keeps it waiting.
            check = check or in_own_thread(self._look, name="auth file")
            late_seconds += await _lateness(asyncio.wait({check}, timeout=POLL_SECONDS))
            if self._bad_since is not None and late_seconds:
                self._bad_since += late_seconds
            if check.done():
                self._take(check.result())
                check = None
            elif not late_seconds:
                self._take(f"auth file {self._path} cannot be read: it takes too long")

    def refresh(self) -> None:
        """Check the file once, and use its new tokens or note that it is bad."""
        self._take(self._look())

    def _look(self) -> TokenTable | str | None:
        """Return new tokens, what is wrong with the file, or None if it has not changed."""
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
                self.suspended = None
                logger.info("auth file read again: %d tokens", len(news))
            case str():
                self._take_complaint(news)

    def _take_complaint(self, complaint: str) -> None:
        now = self._clock()
        if self._bad_since is None:
            self._bad_since = now
        has_grace = now - self._bad_since < GRACE_SECONDS
        effect = "its tokens end soon unless the file is repaired" if has_grace else "no token is valid"
        message = f"{complaint}: {effect}"
        if message != self._complaint:
            logger.error("%s", message)
        self._complaint = message
        if not has_grace:
            self.suspended = self.suspended or self.tokens
            self.tokens = no_tokens(self._page_token_sha256)


async def _lateness(wait: Awaitable[object]) -> float:
    """Wait, for POLL_SECONDS at most. Return how long the event loop stood still meanwhile, 0 for less than
    STILL_SECONDS."""
    loop = asyncio.get_running_loop()
    due = loop.time() + POLL_SECONDS
    await wait
    late_seconds = loop.time() - due
    return late_seconds if late_seconds >= STILL_SECONDS else 0.0


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
