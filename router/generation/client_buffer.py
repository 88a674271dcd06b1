"""Output to a slow reader: unread deltas merge into one piece per output, so memory is bounded.

The engine never waits for a reader. A busy router writes fewer, larger messages. `Outbox` holds the pieces, and
`deliver` writes them and cuts off a client that does not read. Where a protocol can write without waiting, a delta goes
out in the callback that made it, and no task is switched. Does not own the text (proto/text.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from blockyard.proto.v1 import inference_pb2
from blockyard.router.admission.loop_budget import LoopBudget
from blockyard.router.errors import RouterError, SlowReader
from blockyard.router.parsing.formats import NO_END, PromptEnd


@dataclass(slots=True, kw_only=True)
class Delta:
    """The next piece of an output for the client. An output's last delta carries `finish`."""

    text: str
    token_ids: list[int]
    token_offset: int
    finish: inference_pb2.Finish | None = None
    index: int = 0
    """Index of the output within the request."""
    logprobs: list[inference_pb2.TokenLogprob] = field(default_factory=list)
    """One per token, if the client wants them."""
    prompt_logprobs: Sequence[inference_pb2.TokenLogprob] = ()
    prompt_token_ids: Sequence[int] = ()
    """Sent with the output's first piece, if the client wants them."""
    prompt_end: PromptEnd = NO_END
    """Last text of the prompt, with the output's first piece, for a parser of answers."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the first worker reused. 0 while unknown."""
    embedding: bytes = b""
    """The prompt's embedding as the worker made it, with the only delta of a request for it."""

    def merge(self, later: "Delta") -> None:
        """Append the delta that directly follows this one in the same output."""
        assert self.finish is None
        assert later.index == self.index
        assert later.token_offset == self.token_offset + len(self.token_ids)
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        # These come once, with an output's first delta.
        self.prompt_end = self.prompt_end or later.prompt_end
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.prompt_token_ids = self.prompt_token_ids or later.prompt_token_ids
        self.prompt_tokens, self.cached_tokens = later.prompt_tokens, later.cached_tokens
        self.finish = later.finish


Emit = Callable[[Delta], None]
"""Takes the next delta of a request, and never waits."""
Run = Callable[[Emit], Awaitable[None]]
"""Runs a request to its end, and emits its deltas meanwhile."""


@dataclass(slots=True)
class Outbox:
    """Unread deltas of one client: at most one per output, then the end."""

    _waiting: dict[int, Delta] = field(default_factory=dict)
    """Unread deltas by index of the output, the longest waiting first."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: bool = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delta: Delta) -> None:
        """Add a delta without waiting. An unread delta of the same output absorbs it."""
        waiting = self._waiting.setdefault(delta.index, delta)
        if waiting is not delta:
            waiting.merge(delta)
        self._changed.set()

    def end(self) -> None:
        """Mark the end: after the last delta, `take` returns None."""
        self._ended = True
        self._changed.set()

    async def take(self) -> Delta | None:
        """Wait for the next delta and return it, or None at the end."""
        while not self._waiting:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.pop(next(iter(self._waiting)))


class _Pace:
    """Watches how long the current write waits for its client, and ends the writing that waits too long.

    A timer per write would cost more than making its text. So one timer looks four times within the limit.
    """

    def __init__(self, writing: asyncio.Task[None], limit_seconds: float) -> None:
        self._writing = writing
        self._limit_seconds = limit_seconds
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit_seconds / 4, self._look)
        self.since: float | None = None
        """When the current write began, on the loop's clock. None: nothing is being written."""
        self.is_too_slow = False

    def _look(self) -> None:
        if self.since is not None and self._loop.time() - self.since >= self._limit_seconds:
            self.is_too_slow = True
            self._writing.cancel()
        else:
            self._timer = self._loop.call_later(self._limit_seconds / 4, self._look)

    def end(self) -> None:
        self._timer.cancel()
        # A cancelled task refers to its frame, and so to this: only the garbage collector would free the circle.
        del self._writing


async def deliver(
    run: Run,
    write: Callable[[Delta], Awaitable[None]],
    *,
    write_now: Callable[[Delta], bool] = lambda delta: False,
    slow_reader_seconds: float,
    budget: LoopBudget,
) -> None:
    """Run a request in this task and write all its deltas, merged where the client reads slowly.

    `write_now` writes a delta only if that needs no wait, and returns whether it did. It is not called while an earlier
    delta is unwritten. `budget` bounds the other writes per tick of the event loop.

    Raises, in a group, SlowReader if one write takes longer than `slow_reader_seconds`, and any RouterError of the
    request once all that came before is written.
    """
    outbox, loop = Outbox(), asyncio.get_running_loop()
    is_behind = False
    """True while a delta is unwritten or being written."""

    def emit(delta: Delta) -> None:
        nonlocal is_behind
        if is_behind or not write_now(delta):
            is_behind = True
            outbox.put(delta)

    async def write_all() -> None:
        nonlocal is_behind
        while (delta := await outbox.take()) is not None:
            await budget.take()
            pace.since = loop.time()
            try:
                await write(delta)
            except asyncio.CancelledError:
                if pace.is_too_slow:
                    raise SlowReader("the client reads too slowly") from None
                raise
            pace.since = None
            is_behind = len(outbox) > 0

    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(write_all())
        pace = _Pace(writing, slow_reader_seconds)
        failure = None
        try:
            try:
                await run(emit)
            except RouterError as error:
                failure = error
            outbox.end()
            await writing
        finally:
            pace.end()
        if failure is not None:
            raise failure
