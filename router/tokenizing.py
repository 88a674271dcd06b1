"""A process that renders, encodes and names prompts, so that the router's event loop never does.

Owns that process: its start, one call at a time, a deadline for each, its replacement when it hangs or dies.
What it computes is in prompts.py; the small work of detokenising is done in place.

A thread would not do: one busy pure-Python thread lifts the event loop's lag to 5 ms.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from blockyard.proto.block_hash import chain, pack_tokens
from blockyard.proto.text import load_tokenizer
from blockyard.router.prompts import (
    ChatMessage,
    ChatPrompt,
    PromptEncoder,
    PromptError,
    PromptInput,
    TextPrompt,
    TokenPrompt,
)

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


class TokenizingError(RuntimeError):
    """Our failure, not the client's. The message holds nothing of the prompt."""


class TokenizingTimeout(TokenizingError):
    """The prompt took longer than one call may; the process was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prompt as the engine session's Submit carries it."""

    token_ids: bytes
    """Packed little-endian int32."""
    num_tokens: int
    block_names: bytes
    """The root's name, then those of the prompt's full blocks, 16 bytes each; empty without a root."""


class TokenizerService:
    """`async with TokenizerService(path) as service`: prompts to token ids and names, token ids to text.

    One call runs at a time, in order of arrival. Its deadline counts from its turn, so a queue delays but
    fails nothing; whoever waits sets a deadline of his own by cancelling. A cancelled call runs on to its
    deadline, and the next one starts after it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        start_timeout_seconds: float = DEFAULT_START_TIMEOUT_SECONDS,
    ) -> None:
        self._path = str(path)
        self._timeout_seconds = timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._turn = asyncio.Lock()
        self._child: _Child | None = None
        self._last_call: _Call | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    async def start(self) -> None:
        """Loads the tokenizer here and in the process. Raises OSError, ValueError or TokenizingError."""
        self._child = _Child(self._path)
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self._path)
        async with self._turn:
            try:
                await self._ready_child()
            except BrokenProcessPool:
                raise TokenizingError("the tokeniser process died while starting") from None

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(child.end, wait=True)

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

    async def prepare(self, prompt: PromptInput, *, root: bytes | None, block_size: int) -> Prepared:
        """Token ids and, with a root, block names. Raises PromptError or TokenizingError."""
        async with self._turn:
            await self._settle_last_call()
            for _ in range(2):
                with suppress(BrokenProcessPool):
                    child = await self._ready_child()
                    self._last_call = self._begin(child.submit(prompt, root, block_size))
                    return await self._outcome(self._last_call)
                self._replace_child()
        raise TokenizingError("the tokeniser process died twice on one prompt")

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, without special ones."""
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    async def _ready_child(self) -> _Child:
        child = self._child
        if child is None:
            raise TokenizingError("the tokeniser is closed")
        ready = asyncio.wrap_future(child.ready)
        await asyncio.wait({ready}, timeout=self._start_timeout_seconds)
        if not ready.done():
            self._replace_child()
            raise TokenizingTimeout(
                f"the tokeniser process took over {self._start_timeout_seconds:g} s to start"
            )
        ready.result()
        return child

    def _begin(self, future: Future[Prepared]) -> _Call:
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        return _Call(future=asyncio.wrap_future(future), deadline=deadline)

    async def _outcome(self, call: _Call) -> Prepared:
        remaining_seconds = call.deadline - asyncio.get_running_loop().time()
        await asyncio.wait({call.future}, timeout=max(0.0, remaining_seconds))
        self._last_call = None
        if call.future.done():
            return call.future.result()
        call.future.cancel()
        self._replace_child()
        raise TokenizingTimeout(f"tokenising took over {self._timeout_seconds:g} s")

    async def _settle_last_call(self) -> None:
        """Lets a call whose caller has gone run to its end: its time must not count against the next."""
        if self._last_call is not None:
            with suppress(TokenizingError, PromptError, BrokenProcessPool):
                await self._outcome(self._last_call)

    def _replace_child(self) -> None:
        if self._child is not None:
            self._child.end(wait=False)
            self._child = _Child(self._path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    future: asyncio.Future[Prepared]
    deadline: float
    """On the event loop's clock."""


class _Child:
    """One life of the process. It begins to load the tokenizer at once."""

    def __init__(self, path: str) -> None:
        self._path = path
        # Spawned: a fork of a process that runs gRPC threads may never come up.
        self._executor = ProcessPoolExecutor(
            max_workers=1, mp_context=multiprocessing.get_context("spawn"), initializer=_start_child
        )
        self.ready = self._executor.submit(_load, path)

    def submit(self, prompt: PromptInput, root: bytes | None, block_size: int) -> Future[Prepared]:
        return self._executor.submit(_prepare, self._path, prompt, root, block_size)

    def end(self, *, wait: bool) -> None:
        """Ends it whatever it is doing; calls in it end with BrokenProcessPool."""
        # The pool has no public way to end a worker that hangs before Python 3.14.
        for process in list((self._executor._processes or {}).values()):
            process.kill()
        self._executor.shutdown(wait=wait, cancel_futures=True)


def _start_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # transformers imports torch where it can; it takes 2 s and 200 MB, and no tokenizer needs it.
    sys.modules["torch"] = None  # type: ignore[assignment]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@lru_cache(maxsize=1)
def _encoder(path: str) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(path))


def _load(path: str) -> None:
    _encoder(path)


def _prepare(path: str, prompt: PromptInput, root: bytes | None, block_size: int) -> Prepared:
    try:
        token_ids = _encoder(path).encode(prompt)
    except PromptError:
        raise
    except Exception as error:
        # Only the type: the message may quote the prompt, and ends in a log.
        raise TokenizingError(f"tokenising failed with {type(error).__name__}") from None
    packed = pack_tokens(token_ids)
    names = [] if root is None else [root, *chain(root, packed, block_size)]
    return Prepared(token_ids=packed, num_tokens=len(token_ids), block_names=b"".join(names))
