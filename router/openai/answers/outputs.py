"""Outputs of all prompts of a call as one run of deltas. Prompt number p has the indexes from p*n to p*n + n - 1.

Each prompt is a request of its own, and several prompts run in a task each. The first failure ends them all. The number
of outputs at once is bounded: the next prompt starts when one has ended, behind all requests that came meanwhile. So a
call of many prompts delays no other call.

If a limit refuses the first prompt, the whole call is refused. A later prompt waits instead, because the call has done
work by then. Does not own the work of a request (calls/generating.py).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from blockyard.proto.v1 import inference_pb2
from blockyard.router.calls.bounds import CallContext
from blockyard.router.calls.generating import Calls
from blockyard.router.generation.client_buffer import Delta, Emit, Run
from blockyard.router.parsing.formats import AnswerFormat


@asynccontextmanager
async def outputs(
    calls: Calls,
    requests: Sequence[inference_pb2.GenerateRequest | inference_pb2.EmbedRequest],
    context: CallContext,
    *,
    outputs_a_prompt: int = 1,
    sequences_a_prompt: int = 1,
    parsed: AnswerFormat | None = None,
) -> AsyncIterator[Run]:
    """Yield the function that runs the call's prompts and emits their deltas.

    `sequences_a_prompt` are the outputs or beams that a prompt runs at once. It raises what `Calls.deltas` raises, in a
    group for several prompts. For one prompt, a refusal comes at once.
    """
    if len(requests) == 1:
        async with calls.deltas(requests[0], context, parsed=parsed) as (_, run):
            yield run
        return

    async def run_all(emit: Emit) -> None:
        permits = asyncio.Semaphore(max(calls.outputs_a_call // sequences_a_prompt, 1))

        async def run_one(
            request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest, first_index: int
        ) -> None:
            def emit_shifted(delta: Delta) -> None:
                delta.index += first_index
                emit(delta)

            async with permits, calls.deltas(request, context, waits=first_index > 0) as (_, run):
                await run(emit_shifted)

        async with asyncio.TaskGroup() as tasks:
            for number, request in enumerate(requests):
                tasks.create_task(run_one(request, number * outputs_a_prompt))

    yield run_all
