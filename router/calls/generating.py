"""A call that generates, from its admission to its last delta, or tokenises, whatever protocol it came by.

Owns the order of admission, client, deadline and registry, and the turns of the event loop that arrivals and writes
take. The end of a call, whoever ends it, cancels the handler's task and with it everything that the request holds. Does
not own messages on the wire (services/inference.py, openai/) nor what a request does (generation/generation.py).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager

from blockyard.proto.naming.block_hash import unpack_tokens
from blockyard.proto.runtime.logs import REQUEST_ID
from blockyard.proto.v1 import inference_pb2
from blockyard.router.admission.auth import check_admin
from blockyard.router.admission.ledger import Charge
from blockyard.router.admission.rate_limits import RateCharge
from blockyard.router.admission.turn_share import TurnShare
from blockyard.router.calls.bounds import CallBounds, CallContext, Caller
from blockyard.router.errors import Overloaded, Unavailable
from blockyard.router.generation.generation import RouterParts, admit, generate, tokenise
from blockyard.router.generation.output import Delta, deliver
from blockyard.router.generation.registry import RequestRecord
from blockyard.router.request.validation import (
    ValidGeneration,
    check_detokenize,
    check_model,
    prompt_estimate,
    valid_prompt,
)

WRITES_A_TURN = 12
"""One takes 40 to 60 us in gRPC itself. With 256 streams from 4 workers every fourth tick of 5 ms was late at 32, every
twelfth at 12."""

ARRIVALS_A_TURN = 4
"""Requests that are checked and admitted in one turn of the event loop: a burst comes in one."""

CALLS_PART = 8
LEAST_OUTPUTS_A_CALL = 16


def outputs_a_call(max_requests: int) -> int:
    """Outputs of one call that run at once, of all that a router admits: the rest of a call of many prompts waits
    behind what others have sent meanwhile."""
    return min(max(max_requests // CALLS_PART, LEAST_OUTPUTS_A_CALL), max(max_requests // 2, 1))


class Calls:
    """One for each router, shared by its protocols."""

    def __init__(
        self, parts: RouterParts, bounds: CallBounds, *, slow_reader_seconds: float, outputs_a_call: int
    ) -> None:
        self.parts = parts
        self.outputs_a_call = outputs_a_call
        self.bounds = bounds
        self.slow_reader_seconds = slow_reader_seconds
        self._arrivals = TurnShare(ARRIVALS_A_TURN)
        self._writes = TurnShare(WRITES_A_TURN)

    @asynccontextmanager
    async def deltas(
        self, request: inference_pb2.GenerateRequest, context: CallContext, *, waits: bool = False
    ) -> AsyncIterator[tuple[str, AsyncIterator[Delta]]]:
        """An admitted request's id and output; all that it holds is given back at the end. It runs in the calling task,
        which runs no other meanwhile. One that `waits` is not refused by a limit, but comes back when it would be told
        to."""
        parts = self.parts
        with parts.metrics.call() as note:
            await self._arrivals.take()
            caller = self.bounds.caller(context)
            note.tenant = caller.tenant
            valid = admit(parts, request)
            REQUEST_ID.set(valid.request_id)  # of this call's task, to its end
            if valid.policy is not None:
                check_admin("policy")
            deadline = parts.clock() + self.bounds.seconds_left(context)
            async with self.bounds.deadline(context):
                with ExitStack() as held:
                    charge, rate = await self._admitted(held, valid, caller, waits=waits)
                    record = held.enter_context(
                        parts.registry.hold(
                            valid.request_id, tenant=caller.tenant, realm=caller.realm, client=caller.client
                        )
                    )
                    held.enter_context(_counted(rate, record))
                    async with aclosing(generate(parts, valid, record, charge, deadline=deadline)) as deltas:
                        yield valid.request_id, deltas

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, context: CallContext
    ) -> inference_pb2.TokenizeResponse:
        """Raises any RouterError."""
        parts = self.parts
        check_model(request, parts.facts)
        prompt = valid_prompt(request, parts.facts, max_model_len=parts.max_model_len)
        client = self.bounds.caller(context).client
        async with self.bounds.admitted(context, prompt_estimate(prompt)) as charge:
            prepared = await tokenise(parts, prompt, charge, root=None, block_size=1, client=client)
        return inference_pb2.TokenizeResponse(
            token_ids=unpack_tokens(prepared.token_ids), max_model_len=parts.max_model_len
        )

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: CallContext
    ) -> inference_pb2.DetokenizeResponse:
        """Raises any RouterError."""
        parts = self.parts
        check_detokenize(request, parts.facts, max_model_len=parts.max_model_len)
        skip_special = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        async with self.bounds.admitted(context, len(request.token_ids)):
            text = await parts.tokenizing.detokenize(list(request.token_ids), skip_special=skip_special)
        return inference_pb2.DetokenizeResponse(text=text)

    async def _admitted(
        self, held: ExitStack, valid: ValidGeneration, caller: Caller, *, waits: bool
    ) -> tuple[Charge, RateCharge]:
        """What it is charged, in `held`. Raises Overloaded, RateLimited."""
        outputs = valid.sampling.num_sequences
        generated_tokens = outputs * (valid.sampling.max_tokens or self.parts.max_model_len)
        while True:
            charged = self.bounds.charged(
                caller, valid.estimated_tokens, outputs=outputs, generated_tokens=generated_tokens
            )
            try:
                return held.enter_context(charged)
            except Overloaded as refusal:
                if not waits or refusal.retry_after_seconds is None:
                    raise
                await asyncio.sleep(refusal.retry_after_seconds)

    async def deliver(self, deltas: AsyncIterator[Delta], write: Callable[[Delta], Awaitable[None]]) -> None:
        """Writes every piece. Raises SlowReader, in a group."""
        await deliver(deltas, write, slow_reader_seconds=self.slow_reader_seconds, share=self._writes)


@contextmanager
def _counted(rate: RateCharge, record: RequestRecord) -> Iterator[None]:
    """Against the limits a minute in the end: what was tokenised and generated, or nothing for a call that was sent
    away before anything was."""
    was_sent_away = False
    try:
        yield
    except (Overloaded, Unavailable):
        was_sent_away = not record.progress.num_generated
        raise
    finally:
        if was_sent_away:
            rate.void()
        else:
            rate.use(record.prompt_tokens + record.progress.num_generated)
