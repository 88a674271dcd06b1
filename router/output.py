"""From tokens to what the client reads: text without split characters, cut exactly at a stop string, bounded.

`TextOutput` is pure. `Outbox` holds what one client has not read yet, merged to one piece for each output, so that
the engine never waits for a reader and a busy router writes fewer, larger messages; `deliver` writes them out and
cuts off who takes nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockyard.proto.text import IncrementalDetokenizer, StopChecker
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import RouterError, SlowReader
from blockyard.router.turn_share import TurnShare

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, kw_only=True)
class Delta:
    """The next piece of an output. Its last one carries `finish`."""

    text: str
    token_ids: list[int]
    token_offset: int
    finish: inference_pb2.Finish | None = None
    index: int = 0
    """Which of the request's outputs."""
    logprobs: list[inference_pb2.TokenLogprob] = field(default_factory=list)
    """One for each token, if the client wants them."""
    prompt_logprobs: Sequence[inference_pb2.TokenLogprob] = ()

    def merge(self, later: "Delta") -> None:
        """Appends the piece that follows this one."""
        assert self.finish is None
        assert later.index == self.index
        assert later.token_offset == self.token_offset + len(self.token_ids)
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        # They come once, with whichever piece is the first.
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish = later.finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What some tokens gave: the tokens that count, and text that is safe to show."""

    text: str
    token_ids: list[int]
    stop: str | None = None
    """The stop string that ends the output here: no token after these belongs to it."""


class TextOutput:
    """One output's text as it grows. Stop strings are looked for in what follows the first `min_tokens` tokens, and
    shown where `include_stop` says so."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        stop: Sequence[str],
        min_tokens: int,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._checker = StopChecker(stop)
        self._has_stop_strings = bool(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], *, is_last: bool, hides_last: bool) -> Piece:
        """`hides_last`: the last of `token_ids` has no text, because it is what stopped the output."""
        piece = self._push(token_ids, is_last=is_last, hides_last=hides_last)
        if piece.stop is None or not self._include_stop:
            return piece
        return Piece(text=piece.text + piece.stop, token_ids=piece.token_ids, stop=piece.stop)

    def _push(self, token_ids: Sequence[int], *, is_last: bool, hides_last: bool) -> Piece:
        shown = token_ids[:-1] if hides_last else token_ids
        text: list[str] = []
        # Token by token only where a stop string may cut between them.
        for run in [[token] for token in shown] if self._has_stop_strings else [shown]:
            self._num_tokens += len(run)
            delta, stop = self._check(self._detokenizer.push(run))
            text.append(delta)
            if stop is not None:
                taken = len(text) if self._has_stop_strings else len(token_ids)
                return Piece(text="".join(text), token_ids=list(token_ids[:taken]), stop=stop)
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


@dataclass(slots=True)
class Outbox:
    """What waits for one client, at most one piece for each output, then the end."""

    _waiting: dict[int, Delta] = field(default_factory=dict)
    """By output, in order of who has waited longest."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: bool = False
    _error: RouterError | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delta: Delta) -> None:
        """Never waits: what an output brings while its last piece still waits becomes a part of that."""
        waiting = self._waiting.setdefault(delta.index, delta)
        if waiting is not delta:
            waiting.merge(delta)
        self._changed.set()

    async def fill(self, deltas: AsyncIterator[Delta]) -> None:
        """Takes everything; an error of ours is raised to the reader once he has read what came before it."""
        try:
            async for delta in deltas:
                self.put(delta)
        except RouterError as error:
            self._error = error
        self._ended = True
        self._changed.set()

    async def take(self) -> Delta | None:
        """The next piece; None at the end. Raises what ended the output early."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.pop(next(iter(self._waiting)))


@dataclass(slots=True)
class _Pace:
    """Since when one write has waited for its client. A timer for each write would cost more than making its text."""

    limit_seconds: float
    writing_since: float | None = None

    async def watch(self) -> None:
        """Until cancelled. Raises SlowReader; a quarter of the limit late at most."""
        while True:
            await asyncio.sleep(self.limit_seconds / 4)
            since = self.writing_since
            if since is not None and time.monotonic() - since >= self.limit_seconds:
                raise SlowReader("the client reads too slowly")


async def deliver(
    deltas: AsyncIterator[Delta],
    write: Callable[[Delta], Awaitable[None]],
    *,
    slow_reader_seconds: float,
    share: TurnShare,
) -> None:
    """Writes every piece. Raises SlowReader, in a group, where one write takes longer than the client may."""
    outbox, pace = Outbox(), _Pace(slow_reader_seconds)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outbox.fill(deltas))
        watch = tasks.create_task(pace.watch())
        while (delta := await outbox.take()) is not None:
            await share.take()
            pace.writing_since = time.monotonic()
            await write(delta)
            pace.writing_since = None
        watch.cancel()
