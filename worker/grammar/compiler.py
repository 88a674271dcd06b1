"""Grammar compiler for an event loop: a queue before the trial processes, and a cache behind them.

Owns the limits of time and memory, and the cache. A grammar is first compiled in a trial process (sandbox.py), when its
client's turn has come (rotation.py). What passes is compiled again here, in a thread. There are two such processes, the
second from when two clients first want one at once. Equal grammars that are asked for together are compiled once.
Callers may be cancelled: the work continues, within its limits, for the next caller.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Self

from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.v1 import inference_pb2
from blockyard.worker.grammar.compiled import CompiledGrammar, TokenizerSource
from blockyard.worker.grammar.grammar import Grammar, GrammarError, grammar_of
from blockyard.worker.grammar.rotation import Rotation, Turn
from blockyard.worker.grammar.sandbox_process import TrialProcess, TrialsUnavailable
from llguidance import LLTokenizer

TRIALS_OF_A_PROCESS = 200
"""A trial process is restarted after this many: what earlier grammars left behind must not count against later ones."""
REFUSAL_SECONDS = 30.0
"""How long a refusal is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerConfig:
    timeout_seconds: float = 2.0
    """Limit for one grammar, from when its turn has come. Others wait behind it, and common ones take milliseconds."""
    memory_bytes: int = 2**30
    """Memory that a trial process may take beyond what it has once its tokenizer is loaded."""
    start_timeout_seconds: float = 60.0
    max_waiting: int = 64
    """Most grammars that are being compiled or wait for that. One client may have half as many waiting."""
    num_processes: int = 2
    cached_grammars: int = 64
    cached_source_bytes: int = 2**20


class GrammarsBusy(TrialsUnavailable):
    """Too many grammars wait already."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A grammar that is being compiled, was compiled or was refused."""

    task: asyncio.Task[CompiledGrammar]
    turn: Turn
    num_bytes: int
    refused_until: float | None = None
    """Time on the loop's clock. None unless refused."""


@dataclass(slots=True, eq=False)
class _TrialSlot:
    """A slot for one trial process at a time."""

    source: TokenizerSource
    config: CompilerConfig
    process: TrialProcess | None = None
    trials_left: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ready(self) -> TrialProcess:
        if self.process is None or not self.process.is_alive or not self.trials_left:
            await self.end()
            self.process = await TrialProcess.start(
                self.source,
                memory_bytes=self.config.memory_bytes,
                timeout_seconds=self.config.start_timeout_seconds,
            )
            self.trials_left = TRIALS_OF_A_PROCESS
        return self.process

    async def check(self, grammar: Grammar) -> None:
        async with self.lock:
            process = await self.ready()
            self.trials_left -= 1
            await process.check(grammar, timeout_seconds=self.config.timeout_seconds)

    async def end(self) -> None:
        if self.process is not None:
            await self.process.end()
            self.process = None


class GrammarCompiler:
    """Made, used and closed on one event loop. Its processes start with the first grammars, or one with `start`."""

    def __init__(self, source: TokenizerSource, config: CompilerConfig | None = None) -> None:
        self.config = config or CompilerConfig()
        self.num_trials = 0
        self._source = source
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = asyncio.Lock()
        self._slots = [_TrialSlot(source, self.config) for _ in range(self.config.num_processes)]
        self._idle = self._slots[::-1]
        """The next one to be taken comes last."""
        self._rotation = Rotation(self.config.num_processes)
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()
        """The least recently used first."""
        self._tasks = BackgroundTasks(on_failure=None)
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Load the tokenizer here and in a trial process, so that the first grammar need not wait for it.

        Raises ValueError for a model with outputs that cannot be constrained, TrialsUnavailable if the process does not
        start.
        """
        await self._ready_tokenizer()
        async with self._slots[0].lock:
            await self._slots[0].ready()

    async def compile_message(
        self, message: inference_pb2.StructuredOutput, client: int = 0
    ) -> CompiledGrammar:
        """Compile the grammar of a session's message. Raises as `compile` does."""
        grammar = grammar_of(message)
        if grammar is None:
            raise GrammarError("structured output names no grammar")
        return await self.compile(grammar, client)

    async def compile(self, grammar: Grammar, client: int = 0) -> CompiledGrammar:
        """Return the compiled grammar. Unless it is cached, compiling it takes a turn of `client`.

        Raises GrammarError (the client's fault), GrammarsBusy, or TrialsUnavailable (ours).
        """
        task = self._entry(grammar, client).task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if task.cancelled() and not (asker and asker.cancelling()):
                raise TrialsUnavailable("the compiler of grammars is closed") from None
            raise

    async def aclose(self) -> None:
        """End the processes and all waiting work. Compiled grammars stay usable."""
        self._is_closed = True
        await self._tasks.aclose()
        for slot in self._slots:
            async with slot.lock:
                await slot.end()
        self._entries.clear()

    def _entry(self, grammar: Grammar, client: int) -> _Entry:
        if self._is_closed:
            raise TrialsUnavailable("the compiler of grammars is closed")
        entry = self._entries.get(grammar)
        if entry is not None and not self._is_outdated(entry):
            self._entries.move_to_end(grammar)
            self._rotation.join(entry.turn, client)
            return entry
        if sum(not other.task.done() for other in self._entries.values()) >= self.config.max_waiting:
            raise GrammarsBusy(f"{self.config.max_waiting} grammars wait to be compiled")
        if self._rotation.num_waiting(client) >= max(self.config.max_waiting // 2, 1):
            raise GrammarsBusy(f"{self.config.max_waiting // 2} grammars of this client wait to be compiled")
        turn = self._rotation.wait(client)
        task = self._tasks.start(self._compile(grammar, turn), name="compile a grammar")
        entry = self._entries[grammar] = _Entry(task, turn, grammar.num_bytes)
        self._entries.move_to_end(grammar)
        task.add_done_callback(lambda _: self._finish(grammar, entry))
        return entry

    def _is_outdated(self, entry: _Entry) -> bool:
        return entry.refused_until is not None and asyncio.get_running_loop().time() >= entry.refused_until

    def _finish(self, grammar: Grammar, entry: _Entry) -> None:
        """Keep what was compiled or refused, and drop any other end: that says nothing about the grammar."""
        self._rotation.end(entry.turn)
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

    async def _compile(self, grammar: Grammar, turn: Turn) -> CompiledGrammar:
        await turn.future
        slot = self._idle.pop()
        try:
            tokenizer = await self._ready_tokenizer()
            self.num_trials += 1
            await slot.check(grammar)
            compiled = await asyncio.to_thread(_build, grammar, tokenizer)
        finally:
            self._idle.append(slot)
        # A client that has had a slow grammar gets the slow lane at once. Otherwise each new grammar would delay one
        # step before it is recognised.
        times_slow = min(map(self._times_slow, turn.clients))
        if times_slow > compiled.times_slow:
            compiled.hold_for_slow(times_slow)
        return compiled

    def _times_slow(self, client: int) -> int:
        """Return how often the client's worst cached grammar was found slow."""
        done = [entry for entry in self._entries.values() if entry.task.done() and not entry.task.cancelled()]
        compiled = [
            entry for entry in done if entry.task.exception() is None and client in entry.turn.clients
        ]
        return max((entry.task.result().times_slow for entry in compiled), default=0)

    async def _ready_tokenizer(self) -> LLTokenizer:
        async with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(self._source.load)
            return self._tokenizer


def _build(grammar: Grammar, tokenizer: LLTokenizer) -> CompiledGrammar:
    compiled = CompiledGrammar(grammar, tokenizer)
    compiled.try_out()
    return compiled
