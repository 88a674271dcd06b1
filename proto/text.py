"""Turns tokens into text, piece by piece. The router's streams and the offline engine share these rules.

Owns loading a tokenizer, and incremental decoding that never splits a character. Owns stop strings that may span
pieces, and which of an output's tokens are shown. Does not own prompts (router/tokenizing/encoder.py) or which tokens
end an output (the engine).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character that a decoder writes for bytes that are no character, or not yet one."""

_QUIET_VARIABLE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""The switch against transformers' warning that torch is missing."""
_FILES = ("tokenizer*", "vocab.*", "*.model")
"""Files of which each tokenizer has one."""
_MAX_HELD_TOKENS = 64
"""Maximum tokens that wait for a whole character. More are garbage, and the window is cut so that it stays bounded."""
_REMEMBERED_TOKENS = 16_384
_CHARACTER_TOKENS = 4
"""A character takes at most 4 bytes, so at most 4 tokens."""


def load_tokenizer(path: str | Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local checkpoint folder, or of a hub name that is already in the local cache.

    `chat_template` is the text of a Jinja template that replaces the tokenizer's own. Reaches no network and runs no
    code from the checkpoint. Raises OSError or ValueError if there is no tokenizer.
    """
    folder = Path(path)
    if folder.is_dir() and not any(file for pattern in _FILES for file in folder.glob(pattern)):
        raise ValueError(f"{path} has no tokenizer: name a folder or a model that has one (--tokenizer)")
    import_tokenizers()
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except OSError:
        raise
    except Exception as error:
        # A broken file raises whatever its reader raises, and the reader in Rust raises bare Exceptions.
        raise ValueError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def import_tokenizers() -> None:
    """Import what loading a tokenizer needs, which takes seconds. Checking stop strings does not need it."""
    with _torch_out_of_sight():
        from transformers import AutoTokenizer  # noqa: F401


@contextmanager
def _torch_out_of_sight() -> Iterator[None]:
    """Hide torch while transformers is imported. transformers loads torch wherever it finds it, which costs each
    process seconds and 160 MiB, and no tokenizer needs it.

    A process that has already imported torch or transformers keeps them. No other thread may import torch meanwhile.
    """
    if {"torch", "transformers"} & sys.modules.keys():
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to say that there is none
    was_quiet = os.environ.get(_QUIET_VARIABLE)
    os.environ[_QUIET_VARIABLE] = "1"
    try:
        yield
    finally:
        del sys.modules["torch"]
        if was_quiet is None:
            del os.environ[_QUIET_VARIABLE]
        else:
            os.environ[_QUIET_VARIABLE] = was_quiet


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    decode: Callable[[Sequence[int]], str]
    special_ids: frozenset[int]
    alone_chars: Callable[[int], int]
    """Maps a token to the characters of its text. Remembered, because the context is most often one token."""


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> _Vocabulary:
    """Return what decoding needs of a tokenizer. Cached, because listing hundreds of added tokens for each request is
    slow."""
    added = tokenizer.added_tokens_decoder.items()
    decode = _plain_decode(tokenizer)
    return _Vocabulary(
        decode=decode,
        special_ids=frozenset(token_id for token_id, token in added if token.special),
        alone_chars=lru_cache(maxsize=_REMEMBERED_TOKENS)(lambda token_id: len(decode([token_id]))),
    )


def _plain_decode(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    if tokenizer.is_fast:
        # The wrapper around the same call takes eight times as long, and this runs for each token served.
        backend = tokenizer.backend_tokenizer
        return lambda token_ids: str(backend.decode(token_ids, skip_special_tokens=False))
    return lambda token_ids: str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


class IncrementalDetokenizer:
    """Returns the text of a growing list of tokens as deltas. With `skip_special`, special tokens have no text.

    The deltas add up to `tokenizer.decode(all, skip_special_tokens=skip_special)`. Bytes that do not yet make a
    character are held back. The sum has one exception: a byte-fallback tokenizer (sentencepiece) with bytes that never
    make a character. Decoding as a whole would then also drop valid characters right before them, which a stream has
    already shown.

    Only a window is decoded: the tokens last emitted, as context, and the new ones. The context decides whether a
    leading space is written. A token is decoded about three times, however long the output.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, skip_special: bool = True, shown: Set[int] = frozenset()
    ) -> None:
        """`shown` are special tokens whose text is wanted anyway."""
        self._vocabulary = _vocabulary(tokenizer)
        self._skipped_ids = self._vocabulary.special_ids - shown if skip_special else frozenset()
        self._window: list[int] = []
        self._context_tokens = 0
        """Leading tokens of the window that end at a character's end and were emitted."""
        self._emitted_chars = 0
        """Characters of the window's text that were emitted."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete, or "" if they complete no character."""
        self._window += filterfalse(self._skipped_ids.__contains__, token_ids)
        if len(self._window) == self._context_tokens:
            return ""
        text = self._vocabulary.decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        delta = whole[self._emitted_chars :]
        self._emitted_chars = max(self._emitted_chars, len(whole))
        if whole == text:
            self._advance_context()
        elif len(self._window) > self._context_tokens + _MAX_HELD_TOKENS:
            delta += self._cut_garbage(text)
        return delta

    def finish(self) -> str:
        """Return the text that was held back. Call this after the last token."""
        delta = self._vocabulary.decode(self._window)[self._emitted_chars :]
        self._window = []
        self._context_tokens = self._emitted_chars = 0
        return delta

    def _advance_context(self) -> None:
        context = self._window[self._context_tokens :]
        # Tokens without any text (ids that pad the vocabulary) would make the next one look like the first.
        vocabulary = self._vocabulary
        if num_chars := (
            vocabulary.alone_chars(context[0]) if len(context) == 1 else len(vocabulary.decode(context))
        ):
            self._window, self._context_tokens, self._emitted_chars = context, len(context), num_chars

    def _cut_garbage(self, text: str) -> str:
        """Drop the window's head up to a position near its end that no character spans, and return what of the head was
        not emitted. Return "" if there is no such position."""
        decode = self._vocabulary.decode
        last_cut = len(self._window) - _CHARACTER_TOKENS
        for cut in range(last_cut, last_cut - 4 * _CHARACTER_TOKENS, -1):
            head, tail = decode(self._window[:cut]), decode(self._window[cut:])
            if head + tail == text and len(head) >= self._emitted_chars:
                delta = head[self._emitted_chars :]
                self._window = self._window[cut:]
                self._context_tokens = self._emitted_chars = 0
                return delta
        return ""


@dataclass(slots=True)
class _Scan:
    """The search for one stop string: no occurrence of it starts before `start`."""

    stop: str
    start: int = 0

    def advance(self, text: str) -> bool:
        """Move to the first position where the stop string stands, or may come to stand. Return True if it stands."""
        while self.start < len(text):
            if text.startswith(self.stop, self.start):
                return True
            if self.stop.startswith(text[self.start :]):
                return False
            following = text.find(self.stop[0], self.start + 1)
            self.start = len(text) if following < 0 else following
        return False


class StopChecker:
    """Cuts a text that comes in pieces right before its first stop string.

    The first is the one that begins earliest. Of two that begin at one position, it is the one listed first. The split
    into pieces does not matter: a piece is held back as long as it could begin a stop string. Raises ValueError for an
    empty stop string.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if not all(stop_strings):
            raise ValueError("a stop string must not be empty")
        self._scans = [_Scan(stop) for stop in stop_strings]
        self._held = ""
        self._matched: str | None = None

    def push(self, delta: str) -> tuple[str, str | None]:
        """Return (text that is safe to emit, the stop string that ended it or None). After a match there is no more
        text."""
        if self._matched is not None or not self._scans:
            return ("" if self._scans else delta), self._matched
        self._held += delta
        stands = [scan.advance(self._held) for scan in self._scans]
        first = min(range(len(stands)), key=lambda index: self._scans[index].start)
        return self._emit(self._scans[first].start, self._scans[first].stop if stands[first] else None)

    def finish(self) -> tuple[str, str | None]:
        """Return (the text held back, up to a stop string in it, and that stop string or None)."""
        complete = [scan for scan in self._scans if self._held.startswith(scan.stop, scan.start)]
        if not complete or self._matched is not None:
            return self._emit(len(self._held), self._matched)
        first = min(complete, key=lambda scan: scan.start)
        return self._emit(first.start, first.stop)

    def _emit(self, num_chars: int, matched: str | None) -> tuple[str, str | None]:
        text, self._matched = self._held[:num_chars], matched
        self._held = "" if matched is not None else self._held[num_chars:]
        for scan in self._scans:
            scan.start -= min(scan.start, num_chars)
        return text, matched


# Not frozen, as one is made for each token: a frozen dataclass takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class Piece:
    """Text that is safe to show, and the pushed tokens that belong to the output."""

    text: str
    token_ids: list[int]
    stop: str | None = None
    """The stop string that ends the output here. Later tokens do not belong to the output."""


class TextOutput:
    """The text of one output as it grows.

    Stop strings are searched in the text that follows the first `min_tokens` tokens. `include_stop` says whether stop
    strings and stop tokens are shown. `shown` are special tokens with text in any case. Raises ValueError for an empty
    stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop: Sequence[str],
        min_tokens: int,
        stop_token_ids: Set[int] = frozenset(),
        include_stop: bool = False,
        skip_special: bool = True,
        shown: Set[int] = frozenset(),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special, shown=shown)
        self._skip_special = skip_special
        self._checker = StopChecker(stop)
        self._has_stop_strings = bool(stop)
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids
        self._include_stop = include_stop
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], *, is_last: bool, stop_token: int | None = None) -> Piece:
        """Return the next piece. `is_last` releases text that was held back. `stop_token` is the last of `token_ids` if
        it ended the output. Do not call this after a last piece, or a piece with a stop string."""
        shown = token_ids[:-1] if self._hides(stop_token) else token_ids
        piece = self._push(token_ids, shown, is_last=is_last)
        if piece.stop is None or not self._include_stop:
            return piece
        return Piece(text=piece.text + piece.stop, token_ids=piece.token_ids, stop=piece.stop)

    def _hides(self, stop_token: int | None) -> bool:
        """Return whether to hide a stop token. It has no text unless asked for. An end-of-sequence token is also a
        special token."""
        if stop_token is None:
            return False
        is_text = stop_token in self._stop_token_ids or not self._skip_special
        return not (self._include_stop and is_text)

    def _push(self, token_ids: Sequence[int], shown: Sequence[int], *, is_last: bool) -> Piece:
        if not self._has_stop_strings and not is_last:
            self._num_tokens += len(shown)
            return Piece(text=self._detokenizer.push(shown), token_ids=list(token_ids))
        text: list[str] = []
        # Token by token only where a stop string may cut between them.
        for run in [[token] for token in shown] if self._has_stop_strings else [shown]:
            self._num_tokens += len(run)
            delta, stop = self._check(self._detokenizer.push(run))
            text.append(delta)
            if stop is not None:
                return Piece(text="".join(text), token_ids=list(token_ids[: len(text)]), stop=stop)
        if not is_last:
            return Piece(text="".join(text), token_ids=list(token_ids))
        for delta, stop in (self._check(self._detokenizer.finish()), self._checker.finish()):
            text.append(delta)
            if stop is not None:
                return Piece(text="".join(text), token_ids=list(token_ids), stop=stop)
        return Piece(text="".join(text), token_ids=list(token_ids))

    def _check(self, delta: str) -> tuple[str, str | None]:
        if self._num_tokens <= self._min_tokens:
            return delta, None
        return self._checker.push(delta)
