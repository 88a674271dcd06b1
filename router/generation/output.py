"""What a client has not read yet: bounded, because it is merged to one piece for each output.

So the engine never waits for a reader, and a busy router writes fewer, larger messages. `Outbox` holds the pieces;
`deliver` writes them out and cuts off a client that takes nothing. Their text is made in proto/text.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from blockyard.proto.v1 import inference_pb2
from blockyard.router.admission.turn_share import TurnShare
from blockyard.router.errors import RouterError, SlowReader


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
    prompt_token_ids: Sequence[int] = ()
    """With the output's first piece, if the client wants them."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """So many of the prompt's tokens were cached, as far as is known by now."""

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
        self.prompt_token_ids = self.prompt_token_ids or later.prompt_token_ids
        self.prompt_tokens, self.cached_tokens = later.prompt_tokens, later.cached_tokens
        self.finish = later.finish


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
