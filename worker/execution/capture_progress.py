"""Progress of capturing decode graphs: a bar on a terminal, else a log line now and then, and one log line at the end.

Owns the look. It writes to stderr, so that standard output stays clean, and needs only the standard library.
"""

import logging
import sys
import time
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)
WIDTH = 24
"""Width of the bar in characters."""
LOG_EVERY = 8
"""Graphs between two log lines, where there is no terminal."""
ERASE = "\r\x1b[K"
"""Moves the cursor to the beginning of the line, and erases the line."""


class CaptureProgress:
    """Use as `with CaptureProgress(total) as progress:`, with `progress.advance()` after each graph.

    Where the body raises, the bar disappears and no line reports an end.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_terminal:
            print(ERASE, end="", file=sys.stderr, flush=True)
        if error is None:
            logger.info("decode graphs: %d captured in %.1f s", self._done, self._elapsed_seconds())

    def advance(self) -> None:
        self._done += 1
        self._show()
        if not self._is_terminal and self._done % LOG_EVERY == 0 and self._done < self._total:
            logger.info("decode graphs: %d of %d captured", self._done, self._total)

    def _show(self) -> None:
        if self._is_terminal:
            text = bar(self._done, self._total)
            print(
                f"{ERASE}decode graphs {text} {self._elapsed_seconds():.1f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def _elapsed_seconds(self) -> float:
        return time.monotonic() - self._started_at


def bar(done: int, total: int) -> str:
    filled = WIDTH * done // max(1, total)
    return f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total}"
