"""All outputs of a call as one stream of deltas: a prompt's n outputs follow those of the prompt before it.

Each prompt is a request of its own, in a task of its own where there are several; the first failure ends them all. Of
many outputs only so many run at once: the next prompt comes when one has ended, behind all that others have sent by
then. So a call of many prompts keeps nobody waiting. The first prompt is refused where a limit is reached, and the
call with it; a later one waits, since work was done for the call by then. Does not own what a request does
(calls/generating.py).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from blockyard.proto.v1 import inference_pb2
from blockyard.router.calls.bounds import CallContext
from blockyard.router.calls.generating import Calls
from blockyard.router.generation.output import Delta
from blockyard.router.openai.requests.wanted import Wanted


@asynccontextmanager
async def outputs(calls: Calls, wanted: Wanted, context: CallContext) -> AsyncIterator[AsyncIterator[Delta]]:
    """Raises what `Calls.deltas` raises, of several in a group."""
    if len(wanted.requests) == 1:
        async with calls.deltas(wanted.requests[0], context) as (_, deltas):
            yield deltas
        return
    ready: asyncio.Queue[Delta | None] = asyncio.Queue()
    places = asyncio.Semaphore(max(calls.outputs_a_call // wanted.sequences_a_prompt, 1))

    async def run(request: inference_pb2.GenerateRequest, first_index: int) -> None:
        async with places, calls.deltas(request, context, waits=first_index > 0) as (_, deltas):
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
