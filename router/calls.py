"""A call that generates, from its admission to its last delta, whatever protocol it came by.

Owns the order of admission, tenant, deadline and registry, and the turns of the event loop that arrivals and writes
take. The end of a call, whoever ends it, cancels the handler's task and with it everything that the request holds. Does
not own messages on the wire (service.py, openai/) nor what a request does (generation.py).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

from blockyard.proto.logs import REQUEST_ID
from blockyard.proto.v1 import inference_pb2
from blockyard.router.auth import check_admin
from blockyard.router.call_bounds import CallBounds, CallContext
from blockyard.router.generation import RouterParts, admit, generate
from blockyard.router.output import Delta, deliver
from blockyard.router.turn_share import TurnShare

WRITES_A_TURN = 12
"""One takes 40 to 60 us in gRPC itself. With 256 streams from 4 workers every fourth tick of 5 ms was late at 32, every
twelfth at 12."""

ARRIVALS_A_TURN = 4
"""Requests that are checked and admitted in one turn of the event loop: a burst comes in one."""


class Calls:
    """One for each router, shared by its protocols."""

    def __init__(self, parts: RouterParts, bounds: CallBounds, *, slow_reader_seconds: float) -> None:
        self.parts = parts
        self.bounds = bounds
        self.slow_reader_seconds = slow_reader_seconds
        self._arrivals = TurnShare(ARRIVALS_A_TURN)
        self._writes = TurnShare(WRITES_A_TURN)

    @asynccontextmanager
    async def deltas(
        self, request: inference_pb2.GenerateRequest, context: CallContext
    ) -> AsyncIterator[tuple[str, AsyncIterator[Delta]]]:
        """An admitted request's id and output; all that it holds is given back at the end. It runs in the calling task,
        which runs no other meanwhile."""
        parts = self.parts
        with parts.metrics.call():
            await self._arrivals.take()
            valid, caller = admit(parts, request), self.bounds.caller(context)
            REQUEST_ID.set(valid.request_id)  # of this call's task, to its end
            if valid.policy is not None:
                check_admin("policy")
            deadline = parts.clock() + self.bounds.seconds_left(context)
            with (
                parts.ledger.charge(
                    valid.estimated_tokens, outputs=valid.sampling.num_sequences, tenant=caller.tenant
                ) as charge,
                parts.registry.hold(valid.request_id, tenant=caller.tenant, realm=caller.realm) as record,
            ):
                async with (
                    self.bounds.deadline(context),
                    aclosing(generate(parts, valid, record, charge, deadline=deadline)) as deltas,
                ):
                    yield valid.request_id, deltas

    async def deliver(self, deltas: AsyncIterator[Delta], write: Callable[[Delta], Awaitable[None]]) -> None:
        """Writes every piece. Raises SlowReader, in a group."""
        await deliver(deltas, write, slow_reader_seconds=self.slow_reader_seconds, share=self._writes)
