"""Processes that render, encode and name prompts, so that the router's event loop never does.

Owns who works for whom: one call at a time in each process, a deadline for each call, a new process for one that hangs
or dies. What a process is and does is in tokenizer_process.py; the small work of detokenising is done in place.

A thread would not do: one busy pure-Python thread lifts the event loop's lag to 5 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from blockyard.proto.text import load_tokenizer
from blockyard.router.prompts import (
    ChatMessage,
    ChatPrompt,
    PromptError,
    PromptInput,
    TextPrompt,
    TokenPrompt,
)
from blockyard.router.tokenizer_process import Prepared, ProcessDied, TokenizerProcess, TokenizingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ChatMessage",
    "ChatPrompt",
    "Prepared",
    "PromptError",
    "PromptInput",
    "TextPrompt",
    "TokenPrompt",
    "TokenizerService",
    "TokenizingError",
    "TokenizingTimeout",
]

DEFAULT_TIMEOUT_SECONDS = 5.0
DEFAULT_START_TIMEOUT_SECONDS = 60.0


class TokenizingTimeout(TokenizingError):
    """The prompt took longer than one call may; the process was replaced."""


class TokenizerService:
    """`async with TokenizerService(path) as service`: prompts to token ids and names, token ids to text.

    Each process runs one call at a time, and calls begin in order of arrival. A deadline counts from the call's turn,
    so a queue delays but fails nothing; whoever waits sets a deadline of his own by cancelling. A cancelled call runs
    on to its deadline, and the next one of its process starts after it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        num_processes: int = 1,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        start_timeout_seconds: float = DEFAULT_START_TIMEOUT_SECONDS,
    ) -> None:
        self._path = str(path)
        self._seats = [
            _Seat(self._path, timeout_seconds=timeout_seconds, start_timeout_seconds=start_timeout_seconds)
            for _ in range(num_processes)
        ]
        self._idle: asyncio.Queue[_Seat] = asyncio.Queue()
        self._tokenizer: PreTrainedTokenizerBase | None = None

    async def start(self) -> None:
        """Loads the tokenizer here and in the processes. Raises OSError, ValueError or TokenizingError."""
        for seat in self._seats:
            seat.open()
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self._path)
        for seat in self._seats:
            try:
                await seat.ready()
            except ProcessDied:
                raise TokenizingError("the tokeniser process died while starting") from None
            self._idle.put_nowait(seat)

    async def close(self) -> None:
        for seat in self._seats:
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
        """For decoding in place; prompts go through `prepare`."""
        assert self._tokenizer is not None, "the service was not started"
        return self._tokenizer

    def pids(self) -> list[int]:
        """Of the processes that live now."""
        return [seat.process.pid for seat in self._seats if seat.process is not None]

    async def prepare(self, prompt: PromptInput, *, root: bytes | None, block_size: int) -> Prepared:
        """Token ids and, with a root, block names. Raises PromptError or TokenizingError."""
        seat = await self._idle.get()
        try:
            return await seat.prepare(prompt, root, block_size)
        finally:
            self._idle.put_nowait(seat)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, without special ones."""
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    future: asyncio.Future[Prepared]
    deadline: float
    """On the event loop's clock."""


class _Seat:
    """Where one process works, and after it the next. One caller at a time."""

    def __init__(self, path: str, *, timeout_seconds: float, start_timeout_seconds: float) -> None:
        self._path = path
        self._timeout_seconds = timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._last_call: _Call | None = None
        self.process: TokenizerProcess | None = None
        """None before it is opened and after it is closed."""

    def open(self) -> None:
        self.process = TokenizerProcess(self._path)

    async def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.end()
            await asyncio.to_thread(process.join)

    async def prepare(self, prompt: PromptInput, root: bytes | None, block_size: int) -> Prepared:
        await self._settle_last_call()
        for _ in range(2):
            with suppress(ProcessDied):
                process = await self.ready()
                deadline = asyncio.get_running_loop().time() + self._timeout_seconds
                future = process.prepare(prompt, root, block_size)
                self._last_call = _Call(future=future, deadline=deadline)
                return await self._outcome(self._last_call)
            self._replace()
        raise TokenizingError("the tokeniser process died twice on one prompt")

    async def ready(self) -> TokenizerProcess:
        """The process, once it has loaded. Raises what kept it from that, ProcessDied."""
        process = self.process
        if process is None:
            raise TokenizingError("the tokeniser is closed")
        loaded = await process.connect()
        await asyncio.wait({loaded}, timeout=self._start_timeout_seconds)
        if not loaded.done():
            self._replace()
            raise TokenizingTimeout(
                f"the tokeniser process took over {self._start_timeout_seconds:g} s to start"
            )
        loaded.result()
        return process

    async def _outcome(self, call: _Call) -> Prepared:
        remaining_seconds = call.deadline - asyncio.get_running_loop().time()
        await asyncio.wait({call.future}, timeout=max(0.0, remaining_seconds))
        self._last_call = None
        if call.future.done():
            return call.future.result()
        self._replace()
        raise TokenizingTimeout(f"tokenising took over {self._timeout_seconds:g} s")

    async def _settle_last_call(self) -> None:
        """Lets a call whose caller has gone run to its end: its time must not count against the next."""
        if self._last_call is not None:
            with suppress(TokenizingError, PromptError, ProcessDied):
                await self._outcome(self._last_call)

    def _replace(self) -> None:
        if self.process is not None:
            self.process.end()
            self.open()
