"""Tokenizer service: runs processes that render and encode prompts and name their blocks, off the event loop.

Owns the lanes for short and long texts, fairness between clients, and a deadline per call. It also owns the loaded
spare process, which replaces one that hangs or dies. process.py has the process itself. Decoding is small work and runs
in place.

A thread would not do: one busy pure-Python thread raises the event loop's lag to 5 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from blockyard.proto.text import import_tokenizers, load_tokenizer
from blockyard.router.admission.fair_queue import TenantQueues, Ticket
from blockyard.router.tokenizing.process import Prepared, ProcessDied, TokenizerProcess, TokenizingError
from blockyard.router.tokenizing.prompts import (
    ChatMessage,
    ChatPrompt,
    PromptError,
    PromptInput,
    PromptTooLong,
    TemplateKwargsError,
    TextPrompt,
    TokenPrompt,
)
from blockyard.router.tokenizing.wire import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ChatMessage",
    "ChatPrompt",
    "Prepared",
    "PromptError",
    "PromptInput",
    "PromptTooLong",
    "TemplateKwargsError",
    "TextPrompt",
    "TokenPrompt",
    "TokenizerService",
    "TokenizingError",
    "TokenizingTimeout",
]

logger = logging.getLogger(__name__)
DEFAULT_TIMEOUT_SECONDS = 5.0
DEFAULT_START_TIMEOUT_SECONDS = 180.0
"""Longest load of a process. Its imports alone took over 60 s on a machine with 20 times more work than processors."""
LONG_TEXT_CHARACTERS = 64 * 1024
"""A longer text takes more than about 30 ms and goes to the slow lane."""
LONG_TIMEOUT_FACTOR = 4
"""Deadline of the slow lane, as a multiple of the fast lane's. Its process has a low priority."""
SLOW_NICENESS = 10
SPARE_DELAY_SECONDS = 10.0
"""Time between the start of the service and that of its spare process, which must not slow the former down."""
MAX_START_DEATHS = 3
"""Number of processes that die in a row while they load, until a call fails."""
QUANTUM_CHARACTERS = 4096
"""Characters that one visit adds to a client's budget (admission/fair_queue.py)."""


class TokenizingTimeout(TokenizingError):
    """A prompt, or the start of a process, took too long. The process was replaced."""


class TokenizerService:
    """Turns prompts into token ids and block names, and token ids into text: `async with TokenizerService(path) as
    service`.

    Each process runs one call at a time. Waiting clients alternate by the length of their texts. Calls of one client
    begin in order of arrival. A deadline counts from the start of a call, so a queue delays calls but fails none. A
    caller sets its own deadline by cancelling. A cancelled call runs on to its deadline, and the next call of its
    process starts after it.

    Texts above LONG_TEXT_CHARACTERS have a process of low priority to themselves, so they never delay short ones. It
    starts with the first such text.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        chat_template: str | None = None,
        num_processes: int = 1,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        start_timeout_seconds: float = DEFAULT_START_TIMEOUT_SECONDS,
        spare_delay_seconds: float = SPARE_DELAY_SECONDS,
    ) -> None:
        self._path = str(path)
        self._chat_template = chat_template
        self._spare = _Spare(self._path, chat_template, delay_seconds=spare_delay_seconds)
        timeouts = _Timeouts(call_seconds=timeout_seconds, start_seconds=start_timeout_seconds)
        long_timeouts = _Timeouts(
            call_seconds=LONG_TIMEOUT_FACTOR * timeout_seconds, start_seconds=start_timeout_seconds
        )
        self._seats = [_Seat(self._spare, timeouts) for _ in range(num_processes)]
        self._slow_seat = _Seat(self._spare, long_timeouts, niceness=SLOW_NICENESS)
        self._fast_lane = _Lane([])
        self._slow_lane = _Lane([self._slow_seat])
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self.num_guarded = 0
        """Prompts in which a client's text had a control token, which was encoded as plain text."""

    async def start(self) -> None:
        """Load the tokenizer here and in the processes. Raises OSError, ValueError or TokenizingError."""
        for seat in self._seats:
            seat.open()
        await asyncio.to_thread(import_tokenizers)
        for seat in self._seats:
            await seat.ready()
        # Only what the processes could load: loading holds the interpreter lock, and a folder that hangs would hold it.
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self._path, self._chat_template)
        for seat in self._seats:
            self._fast_lane.give(seat)
        self._spare.begin()

    async def close(self) -> None:
        await self._spare.close()
        for seat in (*self._seats, self._slow_seat):
            await seat.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer for decoding in place. Prompts go through `prepare`."""
        assert self._tokenizer is not None, "the service was not started"
        return self._tokenizer

    def pids(self) -> list[int]:
        """Return the ids of the processes for short texts."""
        return [seat.process.pid for seat in self._seats if seat.process is not None]

    @property
    def slow_pid(self) -> int | None:
        """Return the id of the process for long texts, or None before the first of them."""
        return self._slow_seat.process.pid if self._slow_seat.process is not None else None

    @property
    def spare_pid(self) -> int | None:
        """Return the id of the spare process, or None if it has not started."""
        return self._spare.process.pid if self._spare.process is not None else None

    async def prepare(
        self,
        prompt: PromptInput,
        *,
        root: bytes | None,
        block_size: int,
        client: str = "",
        max_tokens: int | None = None,
        keep_last: int | None = None,
        answers: bytes | None = None,
    ) -> Prepared:
        """Return a prompt's token ids and, with a root, its block names. Raises PromptError or TokenizingError.

        Waiting clients take turns by the name `client`. A text that clearly has more than `max_tokens` raises
        PromptTooLong before all of it is encoded. One with only a few more may pass. Only the last `keep_last` tokens
        are kept. `answers` are the earlier ones of the prompt's session, packed (splices.py).
        """
        question = Question(
            prompt=prompt,
            root=root,
            block_size=block_size,
            max_tokens=max_tokens,
            keep_last=keep_last,
            answers=answers,
        )
        num_characters = _text_characters(prompt)
        lane = self._slow_lane if num_characters > LONG_TEXT_CHARACTERS else self._fast_lane
        seat = await lane.take(client, num_characters)
        try:
            prepared = await seat.prepare(question)
        finally:
            lane.give(seat)
        self.num_guarded += prepared.is_guarded
        return prepared

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of these tokens. `skip_special` leaves out special tokens."""
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)


def _text_characters(prompt: PromptInput) -> int:
    """Return the number of characters to encode: 0 for token ids, which are only packed."""
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt():
            return sum(map(len, prompt.texts()))
        case TokenPrompt():
            return 0


class _Lane:
    """Seats (processes) for calls of one kind, short or long. Waiting clients take turns."""

    def __init__(self, seats: Sequence[_Seat]) -> None:
        self._idle = list(seats)
        self._waiting = TenantQueues(quantum_tokens=QUANTUM_CHARACTERS)
        self._futures: dict[int, asyncio.Future[_Seat]] = {}
        """Futures of waiting calls, by their ticket's number."""
        self._numbers = itertools.count()

    async def take(self, client: str, num_characters: int) -> _Seat:
        """Wait for a free seat. The caller gives it back by `give`."""
        number = next(self._numbers)
        ticket = Ticket(rank=number, number=number, tenant=client, cost_tokens=num_characters)
        future: asyncio.Future[_Seat] = asyncio.get_running_loop().create_future()
        self._futures[number] = future
        self._waiting.add(ticket)
        self._seat_waiting()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(future.result())
            elif self._futures.pop(number, None) is not None:
                self._waiting.remove(ticket, was_served=False)
            raise

    def give(self, seat: _Seat) -> None:
        self._idle.append(seat)
        self._seat_waiting()

    def _seat_waiting(self) -> None:
        while self._idle and (ticket := self._waiting.first()) is not None:
            future = self._futures.pop(ticket.number)
            # A cancelled caller runs only in the loop's next tick. Until then its ticket waits here.
            self._waiting.remove(ticket, was_served=not future.cancelled())
            if not future.cancelled():
                future.set_result(self._idle.pop())


class _Spare:
    """Spare process, which loads the tokenizer before it is needed."""

    def __init__(self, path: str, chat_template: str | None, *, delay_seconds: float) -> None:
        self._path = path
        self._chat_template = chat_template
        self._delay_seconds = delay_seconds
        self._timer: asyncio.TimerHandle | None = None
        self.process: TokenizerProcess | None = None

    def begin(self) -> None:
        """Start the spare after the delay. Each spare that is taken is replaced at once."""
        self._timer = asyncio.get_running_loop().call_later(self._delay_seconds, self._start)

    def take(self) -> TokenizerProcess:
        """Return the spare and start another, or without a spare return a process that begins to load now."""
        process, self.process = self.process, None
        if process is None:
            return TokenizerProcess(self._path, self._chat_template)
        self._start()
        return process

    def _start(self) -> None:
        self.process = TokenizerProcess(self._path, self._chat_template)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        process, self.process = self.process, None
        if process is not None:
            process.end()
            await asyncio.to_thread(process.join)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timeouts:
    call_seconds: float
    start_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    future: asyncio.Future[Prepared]
    deadline: float
    """Time on the event loop's clock at which the call has taken too long."""


class _Seat:
    """Place of one process, which is replaced when it dies or hangs. One caller at a time."""

    def __init__(self, spare: _Spare, timeouts: _Timeouts, *, niceness: int = 0) -> None:
        self._spare = spare
        self._timeouts = timeouts
        self._niceness = niceness
        self._last_call: _Call | None = None
        self._is_closed = False
        self.process: TokenizerProcess | None = None
        """None before `open` and after `close`."""

    def open(self) -> None:
        if self._is_closed:
            raise TokenizingError("the tokeniser is closed")
        self.process = self._spare.take()
        if self._niceness:
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self.process.pid, self._niceness)

    async def close(self) -> None:
        self._is_closed = True
        process, self.process = self.process, None
        if process is not None:
            process.end()
            await asyncio.to_thread(process.join)

    async def prepare(self, question: Question) -> Prepared:
        await self._finish_last_call()
        for _ in range(2):
            process = await self.ready()
            deadline = asyncio.get_running_loop().time() + self._timeouts.call_seconds
            future = process.prepare(question)
            self._last_call = _Call(future=future, deadline=deadline)
            with suppress(ProcessDied):
                return await self._outcome(self._last_call)
            self._replace("died")
        raise TokenizingError("the tokeniser process died twice on one prompt")

    async def ready(self) -> TokenizerProcess:
        """Wait until the process has loaded, and return it. Replace one that dies or loads too long.

        Raises what prevents loading, or TokenizingError.
        """
        for _ in range(MAX_START_DEATHS):
            if self.process is None:
                self.open()
            process = self.process
            assert process is not None
            loaded = await process.connect()
            if not loaded.done():
                await asyncio.wait({loaded}, timeout=self._timeouts.start_seconds)
            if not loaded.done():
                self._replace("took too long to start")
                raise TokenizingTimeout(
                    f"the tokeniser process took over {self._timeouts.start_seconds:g} s to start"
                )
            # A loaded process that died while idle still looks ready. Its next call fails.
            with suppress(ProcessDied):
                loaded.result()
                return process
            self._replace("died")
        raise TokenizingError("the tokeniser process died while starting")

    async def _outcome(self, call: _Call) -> Prepared:
        remaining_seconds = call.deadline - asyncio.get_running_loop().time()
        await asyncio.wait({call.future}, timeout=max(0.0, remaining_seconds))
        self._last_call = None
        if call.future.done():
            return call.future.result()
        self._replace("took too long over a prompt")
        raise TokenizingTimeout(f"tokenising took over {self._timeouts.call_seconds:g} s")

    async def _finish_last_call(self) -> None:
        """Wait until a cancelled call has ended, so that its time does not count against the next one."""
        if self._last_call is not None:
            with suppress(TokenizingError, PromptError, ProcessDied):
                await self._outcome(self._last_call)

    def _replace(self, why: str) -> None:
        if self.process is not None:
            logger.warning("the tokeniser process %d %s, and another takes its place", self.process.pid, why)
            self.process.end()
            self.open()
