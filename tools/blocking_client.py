"""Writes router/client/sync.py from aio.py: `python -m tools.blocking_client [--check]` from the project root.

Drops `async` and `await` and replaces names token by token, as httpcore's unasync does. It replaces a few phrases of
docstrings too. `--check` writes nothing and fails where the committed file differs. Does not own what differs in kind:
aio_channels.py and sync_channels.py have it under equal names.
"""

import io
import itertools
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path("router/client/aio.py")
TARGET = Path("router/client/sync.py")
HEADER = "# Generated from aio.py by tools/blocking_client.py; do not edit.\n"
_RUFF_CONFIG = Path(__file__).parents[1] / "pyproject.toml"
DROPPED = frozenset({"async", "await"})
NAMES = {
    "AsyncClient": "Client",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclosing": "closing",
    "aio_channels": "sync_channels",
}
"""Names of the blocking client, by those of the asyncio one."""
PHRASES = {
    "The asyncio client:": "The blocking client:",
    "Channels are in aio_channels.py. `python -m tools.blocking_client` writes the\nblocking client from this file.": (
        "Channels are in sync_channels.py."
    ),
    "Belongs to the event loop that first uses it.": "Safe to share among threads.",
}
"""Phrases of the blocking client's docstrings, by those of the asyncio one. The source has each of them once."""


def blocking(source: str) -> str:
    """Return the blocking client that follows from the source of the asyncio one.

    Raises ValueError if the source lacks a name or phrase, or if an asynchronous word would be left.
    """
    text = "".join(_pieces(source))
    for phrase, replacement in PHRASES.items():
        if text.count(phrase) != 1:
            raise ValueError(f"{SOURCE} must have this phrase once: {phrase!r}")
        text = text.replace(phrase, replacement)
    missing = [name for name in (*NAMES, *DROPPED) if name not in source]
    left = [word for word in ("async", "await", "aio") if word in text]
    if missing or left:
        raise ValueError(f"names that {SOURCE} no longer has: {missing}; asynchronous words left: {left}")
    return _formatted(HEADER + text)


def _pieces(source: str) -> Iterator[str]:
    """Yield the replaced tokens, and the whitespace before each as it is. A dropped word takes its space along."""
    line_offsets = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    end, was_dropped = 0, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start = line_offsets[token.start[0] - 1] + token.start[1]
        if not was_dropped:
            yield source[end:start]
        was_dropped = token.type == tokenize.NAME and token.string in DROPPED
        if not was_dropped:
            yield NAMES.get(token.string, token.string) if token.type == tokenize.NAME else token.string
        end = line_offsets[token.end[0] - 1] + token.end[1]


def _formatted(text: str) -> str:
    options = ["--quiet", "--config", str(_RUFF_CONFIG), "--stdin-filename", str(TARGET), "-"]
    for arguments in (["check", "--select", "I", "--fix"], ["format"]):
        command = [sys.executable, "-m", "ruff", *arguments, *options]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> int:
    made = blocking(SOURCE.read_text(encoding="utf-8"))
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(made, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == made:
        return 0
    print(f"{TARGET} is out of date, run `python -m tools.blocking_client`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
