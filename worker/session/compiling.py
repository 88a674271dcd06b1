"""Compiling: the requests of one router that wait for their grammar.

Owns the wait. Requests behind a waiting one pass it. A cancel or the end of the stream ends the wait, and then nothing
starts. Deadlines run meanwhile. Does not compile (../grammar/), or start a request itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.proto.v1.session_pb2 import RejectReason
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.grammar.compiler import GrammarsBusy
from blockyard.worker.grammar.grammar import GrammarError
from blockyard.worker.session.submits import Refused

logger = logging.getLogger(__name__)

LEAST_DEADLINE_SECONDS = 0.001
CompileGrammar: TypeAlias = Callable[[StructuredOutput, int], Awaitable[object]]
"""Compiles a grammar for the engine. The number is the client in whose turn that is done.

Raises ValueError for what cannot be compiled within its limits, and GrammarsBusy where too many wait. The client sees
only the text of a GrammarError.
"""
Refuse: TypeAlias = Callable[[RejectReason, str], object]
"""Takes the reason of a refusal, and a sentence about it for the client, which may be empty."""


class Compiling:
    """The requests of one router that wait for a grammar, by handle: the router's number of a request.

    Used on one event loop.
    """

    def __init__(self, compile_grammar: CompileGrammar | None) -> None:
        """Without `compile_grammar` every grammar is refused."""
        self._compile_grammar = compile_grammar
        self._owner = BackgroundTasks()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, handle: int) -> bool:
        return handle in self._tasks

    def start(
        self,
        handle: int,
        request: EngineRequest,
        wanted: StructuredOutput,
        *,
        client: int,
        then: Callable[[EngineRequest], object],
        refuse: Refuse,
    ) -> None:
        """Compile `wanted` in the background. Then call `then` with the request and its grammar, or `refuse`.

        After a cancel, call neither.
        """
        assert handle not in self._tasks
        work = self._run(request, wanted, client, then, refuse)
        task = self._tasks[handle] = self._owner.start(work, name="wait for a grammar")
        task.add_done_callback(lambda _: self._tasks.pop(handle))

    def cancel(self, handle: int) -> None:
        """Cancel a wait. An unknown or ended one is ignored."""
        if handle in self._tasks:
            self._tasks[handle].cancel()

    def cancel_all(self) -> list[int]:
        """Cancel all waits, and return their handles."""
        waiting = [handle for handle, task in self._tasks.items() if not task.done()]
        for handle in waiting:
            self._tasks[handle].cancel()
        return waiting

    async def aclose(self) -> None:
        """Cancel all waits, and wait for their end."""
        await self._owner.aclose()

    def afterwards(self, handle: int, call: Callable[[], object]) -> None:
        """Call `call` once the request of this handle no longer waits, at once where it does not."""
        if handle in self._tasks:
            self._tasks[handle].add_done_callback(lambda _: call())
        else:
            call()

    async def _run(
        self,
        request: EngineRequest,
        wanted: StructuredOutput,
        client: int,
        then: Callable[[EngineRequest], object],
        refuse: Refuse,
    ) -> None:
        try:
            compiled = await self._compiled(request, wanted, client)
        except Refused as refused:
            refuse(refused.reason, "")
        except GrammarError as error:
            refuse(RejectReason.REJECT_REASON_GRAMMAR, str(error))
        except Exception:
            logger.exception("the grammar compiler failed")
            refuse(RejectReason.REJECT_REASON_INTERNAL, "")
        else:
            then(compiled)

    async def _compiled(self, request: EngineRequest, wanted: StructuredOutput, client: int) -> EngineRequest:
        """Return the request with its compiled grammar and the rest of its deadline. Raises Refused and
        GrammarError."""
        if self._compile_grammar is None:
            raise GrammarError("this worker does not support structured output")
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(request.deadline_seconds):
                grammar = await self._compile_grammar(wanted, client)
        except GrammarsBusy as error:
            raise Refused(RejectReason.REJECT_REASON_BUSY) from error
        except TimeoutError as error:
            raise Refused(RejectReason.REJECT_REASON_DEADLINE) from error
        except GrammarError:
            raise
        except ValueError as error:
            raise Refused(RejectReason.REJECT_REASON_GRAMMAR) from error
        if request.deadline_seconds is None:
            return replace(request, grammar=grammar)
        left_seconds = request.deadline_seconds - (clock() - began)
        return replace(request, grammar=grammar, deadline_seconds=max(left_seconds, LEAST_DEADLINE_SECONDS))
