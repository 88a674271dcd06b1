"""One run of the sandbox process, as the worker sees it: start, questions, and end.

Owns no queue and no cache. Takes one question at a time.
"""

import asyncio
import json
import signal
import sys
from contextlib import suppress

from blockyard.worker.grammar.compiled import TokenizerSource
from blockyard.worker.grammar.grammar import Grammar, GrammarError
from blockyard.worker.grammar.sandbox import OUT_OF_MEMORY, first_line, grammar_line

EXIT_SECONDS = 5.0
"""Time within which a process that has closed its output should end."""


class TrialsUnavailable(RuntimeError):
    """No trial process could be used, so the grammar was not tried. This says nothing about the grammar."""


class TrialProcess:
    """A running trial process. Always end it with `end`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, source: TokenizerSource, *, memory_bytes: int, timeout_seconds: float
    ) -> "TrialProcess":
        """Return a started process, whose tokenizer is loaded. Raises TrialsUnavailable."""
        # A new program, never a fork: a fork of a process that runs gRPC and torch threads may hang.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "blockyard.worker.grammar.sandbox",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # What the library prints when it gives up may quote a grammar.
            stderr=asyncio.subprocess.DEVNULL,
        )
        trials = cls(process)
        try:
            async with asyncio.timeout(timeout_seconds):
                if not await trials._ask(first_line(source, memory_bytes)):
                    raise TrialsUnavailable("the trial process for grammars ended at its start")
        except TimeoutError:
            await trials.end()
            raise TrialsUnavailable(
                f"the trial process for grammars took over {timeout_seconds:g} s to start"
            ) from None
        except BaseException:
            await trials.end()
            raise
        return trials

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def check(self, grammar: Grammar, *, timeout_seconds: float) -> None:
        """Compile a grammar in the trial process. Raises GrammarError for one that the worker must not compile.

        The process may then be gone.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                answer = await self._ask(grammar_line(grammar))
        except TimeoutError:
            await self.end()
            raise GrammarError("the grammar takes too long to compile") from None
        if not answer:
            # It is ending by itself. A kill now could hide how: Popen.kill asks for the status first, and keeps it.
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await asyncio.shield(self._process.wait())
            await self.end()
            # Rust aborts where memory runs out. A stack that overflows ends the process otherwise.
            aborted = self._process.returncode == -signal.SIGABRT
            raise GrammarError(OUT_OF_MEMORY if aborted else "the grammar cannot be compiled")
        problem = json.loads(answer)
        if problem is not None:
            raise GrammarError(problem)

    async def _ask(self, line: bytes) -> bytes:
        """Send a line, and return the answer. It is empty if the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ConnectionError):
            self._process.stdin.write(line)
            await self._process.stdin.drain()
            return await self._process.stdout.readline()
        return b""

    async def end(self) -> None:
        """Kill the process and wait for its end, even where the caller is cancelled meanwhile."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.shield(self._process.wait())
        if self._process.stdin is not None:
            self._process.stdin.close()
