"""Grammars to compiled grammars, for an event loop: a queue before the process of trials, and a cache behind it.

Owns the order, the limits of time and memory, and what is remembered. A grammar is first compiled in the process of
trials (trial.py), one at a time in order of arrival; what passes is compiled again here, in a thread. Equal grammars
that are asked for together are compiled once. Who asks may be cancelled: the work goes on, within its limits, for
whoever asks next.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Self

from blockyard.proto.v1 import inference_pb2
from blockyard.worker.grammar.compiled import CompiledGrammar, TokenizerSource
from blockyard.worker.grammar.grammar import Grammar, GrammarError, grammar_of
from blockyard.worker.grammar.trial_process import TrialProcess, TrialsUnavailable
from llguidance import LLTokenizer

TRIALS_OF_A_PROCESS = 200
"""Then it is started afresh: what earlier grammars left behind must not count against later ones."""
REFUSAL_SECONDS = 30.0
"""So long a refusal is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerConfig:
    timeout_seconds: float = 2.0
    """For one grammar, from when its turn has come; others wait behind it, and common ones take milliseconds."""
    memory_bytes: int = 2**30
    """What the process of trials may take beyond what it has once its tokenizer is loaded."""
    start_timeout_seconds: float = 60.0
    max_waiting: int = 64
    """Grammars that are compiled or wait for it."""
    cached_grammars: int = 64
    cached_source_bytes: int = 2**20


class GrammarsBusy(TrialsUnavailable):
    """Too many grammars wait already."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A grammar that is or was compiled."""

    task: asyncio.Task[CompiledGrammar]
    num_bytes: int
    refused_until: float | None = None
    """On the loop's clock; None unless refused."""


class GrammarCompiler:
    """Made, used and closed on one event loop. Starts its process with the first grammar, or with `start`."""

    def __init__(self, source: TokenizerSource, config: CompilerConfig | None = None) -> None:
        self.config = config or CompilerConfig()
        self.num_trials = 0
        self._source = source
        self._tokenizer: LLTokenizer | None = None
        self._process: TrialProcess | None = None
        self._trials_left = 0
        self._turn = asyncio.Lock()
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()
        """The least recently used first."""
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Loads the tokenizer here and in the process, so that the first grammar need not wait for it.

        Raises ValueError for a model whose outputs cannot be constrained, TrialsUnavailable if there is no process.
        """
        async with self._turn:
            await self._ready_tokenizer()
            await self._ready_process()

    async def compile_message(self, message: inference_pb2.StructuredOutput) -> CompiledGrammar:
        """What the session calls. Raises as `compile` does."""
        grammar = grammar_of(message)
        if grammar is None:
            raise GrammarError("structured output names nothing to follow")
        return await self.compile(grammar)

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises GrammarError (the client's fault), GrammarsBusy, or TrialsUnavailable (ours)."""
        task = self._entry(grammar).task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if task.cancelled() and not (asker and asker.cancelling()):
                raise TrialsUnavailable("the compiler of grammars is closed") from None
            raise

    async def aclose(self) -> None:
        """Ends the process and all that waits. Compiled grammars stay usable."""
        self._is_closed = True
        tasks = [entry.task for entry in self._entries.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._turn:
            await self._end_process()
        self._entries.clear()

    def _entry(self, grammar: Grammar) -> _Entry:
        if self._is_closed:
            raise TrialsUnavailable("the compiler of grammars is closed")
        entry = self._entries.get(grammar)
        if entry is not None and not self._is_outdated(entry):
            self._entries.move_to_end(grammar)
            return entry
        if sum(not other.task.done() for other in self._entries.values()) >= self.config.max_waiting:
            raise GrammarsBusy(f"{self.config.max_waiting} grammars wait to be compiled")
        task = asyncio.get_running_loop().create_task(self._compile(grammar))
        entry = self._entries[grammar] = _Entry(task, grammar.num_bytes)
        self._entries.move_to_end(grammar)
        task.add_done_callback(lambda _: self._settle(grammar, entry))
        return entry

    def _is_outdated(self, entry: _Entry) -> bool:
        return entry.refused_until is not None and asyncio.get_running_loop().time() >= entry.refused_until

    def _settle(self, grammar: Grammar, entry: _Entry) -> None:
        """Keeps what is compiled and what is refused; anything else says nothing of the grammar."""
        error = None if entry.task.cancelled() else entry.task.exception()
        if isinstance(error, GrammarError):
            entry.refused_until = asyncio.get_running_loop().time() + REFUSAL_SECONDS
        elif (error or entry.task.cancelled()) and self._entries.get(grammar) is entry:
            del self._entries[grammar]
        self._evict()

    def _evict(self) -> None:
        done = [(grammar, entry) for grammar, entry in self._entries.items() if entry.task.done()]
        num_bytes = sum(entry.num_bytes for _, entry in done)
        surplus = len(done) - self.config.cached_grammars
        for grammar, entry in done:
            if surplus <= 0 and num_bytes <= self.config.cached_source_bytes:
                return
            del self._entries[grammar]
            surplus -= 1
            num_bytes -= entry.num_bytes

    async def _compile(self, grammar: Grammar) -> CompiledGrammar:
        async with self._turn:
            tokenizer = await self._ready_tokenizer()
            process = await self._ready_process()
            self.num_trials += 1
            self._trials_left -= 1
            await process.check(grammar, timeout_seconds=self.config.timeout_seconds)
        return await asyncio.to_thread(_build, grammar, tokenizer)

    async def _ready_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(self._source.load)
        return self._tokenizer

    async def _ready_process(self) -> TrialProcess:
        if self._process is None or not self._process.is_alive or not self._trials_left:
            await self._end_process()
            self._process = await TrialProcess.start(
                self._source,
                memory_bytes=self.config.memory_bytes,
                timeout_seconds=self.config.start_timeout_seconds,
            )
            self._trials_left = TRIALS_OF_A_PROCESS
        return self._process

    async def _end_process(self) -> None:
        if self._process is not None:
            await self._process.end()
            self._process = None


def _build(grammar: Grammar, tokenizer: LLTokenizer) -> CompiledGrammar:
    compiled = CompiledGrammar(grammar, tokenizer)
    compiled.try_out()
    return compiled
