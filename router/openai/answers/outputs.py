"""Outputs of all prompts of a call as one stream of deltas. Prompt number p has the indexes from p*n to p*n + n - 1.

Each prompt is a request of its own, and several prompts run in a task each. The first failure ends them all. The number
of outputs at once is bounded: the next prompt starts when one has ended, behind all requests that came meanwhile. So a
call of many prompts delays no other call.

If a limit refuses the first prompt, the whole call is refused. A later prompt waits instead, because the call has done
work by then. Does not own the work of a request (calls/generating.py).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from blockyard.proto.v1 import inference_pb2
from blockyard.router.calls.bounds import CallContext
from blockyard.router.calls.generating import Calls
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.openai.requests.wanted import Wanted


@asynccontextmanager
async def outputs(calls: Calls, wanted: Wanted, context: CallContext) -> AsyncIterator[AsyncIterator[Delta]]:
    """Run the call's prompts and yield the stream of their deltas.

    Raises what `Calls.deltas` raises, in a group for several prompts.
    """
    if len(wanted.requests) == 1:
        async with calls.deltas(wanted.requests[0], context) as (_, deltas):
            yield deltas
        return
    ready: asyncio.Queue[Delta | None] = asyncio.Queue()
    permits = asyncio.Semaphore(max(calls.outputs_a_call // wanted.sequences_a_prompt, 1))

    async def run(request: inference_pb2.GenerateRequest, first_index: int) -> None:
        async with permits, calls.deltas(request, context, waits=first_index > 0) as (_, deltas):
            async for delta in deltas:
                delta.index += first_index
                ready.put_nowait(delta)
        ready.put_nowait(None)

    async with asyncio.TaskGroup() as tasks:
        for number, request in enumerate(wanted.requests):
            tasks.create_task(run(request, number * wanted.outputs_a_prompt))
        yield _until_ended(ready, len(wanted.requests))


async def _until_ended(ready: asyncio.Queue[Delta | None], num_requests: int) -> AsyncIterator[Delta]:
    while num_requests:
        delta = await ready.get()
        if delta is None:
            num_requests -= 1
        else:
            yield delta
