"""Calls that generate or tokenize, from admission to the last delta, for all protocols.

Owns the order in which a call is checked, charged, bounded and registered, and the share of the event loop that
arrivals and writes take. The end of a call, whatever its cause, cancels the handler's task and frees everything that
the request holds. Does not own messages (services/inference.py, openai/) or the work of a request
(generation/generation.py).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from blockyard.proto.naming.block_hash import unpack_tokens
from blockyard.proto.runtime.logs import REQUEST_ID
from blockyard.proto.v1 import inference_pb2
from blockyard.router.admission.auth import check_admin
from blockyard.router.admission.ledger import Charge
from blockyard.router.admission.loop_budget import LoopBudget
from blockyard.router.admission.rate_limits import RateCharge
from blockyard.router.calls.bounds import CallBounds, CallContext, Caller
from blockyard.router.errors import Overloaded, Unavailable
from blockyard.router.generation.client_buffer import Delta, Emit, Run, deliver
from blockyard.router.generation.generation import RouterParts, admit, generate, tokenise
from blockyard.router.generation.registry import RequestRecord
from blockyard.router.generation.request_trace import RequestTrace
from blockyard.router.model_groups import ModelGroups
from blockyard.router.parsing.formats import AnswerFormat
from blockyard.router.request.prompts import prompt_estimate, valid_prompt
from blockyard.router.request.validation import ValidGeneration, check_detokenize

if TYPE_CHECKING:
    from blockyard.router.calls.tracing import Tracing

WRITES_PER_TICK = 12
"""Deltas written in one tick of the event loop. A write takes 40 to 60 us in gRPC itself.

With 256 streams from 4 workers, 32 writes delayed every 4th tick of 5 ms, and 12 writes every 12th.
"""

ARRIVALS_PER_TICK = 2
"""Requests that are checked and admitted in one tick of the event loop. A burst arrives in one tick."""

CALLS_PART = 8
LEAST_OUTPUTS_A_CALL = 16


def outputs_a_call(max_requests: int) -> int:
    """Return how many outputs of one call with several prompts may run at once.

    It is a part of `max_requests`. The other prompts of the call wait behind newer calls of others.
    """
    return min(max(max_requests // CALLS_PART, LEAST_OUTPUTS_A_CALL), max(max_requests // 2, 1))


class Calls:
    """Runs the calls of one router that generate or tokenize, for all its protocols."""

    def __init__(
        self,
        groups: ModelGroups,
        bounds: CallBounds,
        *,
        slow_reader_seconds: float,
        outputs_a_call: int,
        tracing: "Tracing | None" = None,
    ) -> None:
        """`tracing`: None makes no traces."""
        self.groups = groups
        self.outputs_a_call = outputs_a_call
        self.bounds = bounds
        self.slow_reader_seconds = slow_reader_seconds
        self._tracing = tracing
        self._arrivals = LoopBudget(ARRIVALS_PER_TICK)
        self._writes = LoopBudget(WRITES_PER_TICK)

    @asynccontextmanager
    async def deltas(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest,
        context: CallContext,
        *,
        waits: bool = False,
        parsed: AnswerFormat | None = None,
    ) -> AsyncIterator[tuple[str, Run]]:
        """Check, charge and register a request. Yield its id and the function that runs it once.

        The end of the context frees everything that the request holds. The calling task must run the request, and no
        other meanwhile. With `waits`, a refusal by a limit is not raised: the charge is tried again after the
        refusal's retry delay. `parsed` is the format in which the caller parses the outputs. Raises any RouterError.
        """
        with (
            self.groups.in_use(request) as parts,
            parts.metrics.call() as note,
            self._traced(parts, request, context) as trace,
        ):
            caller = self.bounds.caller(context)
            self.groups.check(request, caller.tenant)
            await self._arrivals.take()
            note.tenant = caller.tenant
            valid = admit(parts, request, caller.tenant)
            REQUEST_ID.set(valid.request_id)  # for this call's task, until it ends
            if valid.policy is not None:
                check_admin("policy")
            deadline = parts.clock() + self.bounds.seconds_left(context)
            async with self.bounds.deadline(context):
                with ExitStack() as held:
                    charge, rate = await self._admitted(held, parts, valid, caller, waits=waits)
                    record = held.enter_context(
                        parts.registry.hold(
                            valid.request_id,
                            tenant=caller.tenant,
                            realm=caller.realm,
                            client=caller.client,
                            model=parts.facts.name,
                        )
                    )
                    held.enter_context(_counted(rate, record))
                    if trace is not None:
                        record.progress.trace = trace
                        trace.admitted_at, trace.record = parts.clock(), record

                    async def run(emit: Emit) -> None:
                        await generate(parts, valid, record, charge, emit, deadline=deadline, parsed=parsed)

                    yield valid.request_id, run

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, context: CallContext
    ) -> inference_pb2.TokenizeResponse:
        """Charge a prompt and return its token ids. Raises any RouterError."""
        with self.groups.in_use(request) as parts:
            caller = self.bounds.caller(context)
            self.groups.check(request, caller.tenant)
            prompt = valid_prompt(request, parts.facts, max_model_len=parts.max_model_len)
            async with self.bounds.admitted(context, prompt_estimate(prompt), parts.ledger) as charge:
                prepared = await tokenise(
                    parts, prompt, charge, root=None, block_size=1, client=caller.client
                )
            return inference_pb2.TokenizeResponse(
                token_ids=unpack_tokens(prepared.token_ids), max_model_len=parts.max_model_len
            )

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: CallContext
    ) -> inference_pb2.DetokenizeResponse:
        """Charge tokens and return their text. Raises any RouterError."""
        with self.groups.in_use(request) as parts:
            self.groups.check(request, self.bounds.caller(context).tenant)
            check_detokenize(request, parts.facts, max_model_len=parts.max_model_len)
            skip_special = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            async with self.bounds.admitted(context, len(request.token_ids), parts.ledger):
                text = parts.tokenizing.detokenize(list(request.token_ids), skip_special=skip_special)
            return inference_pb2.DetokenizeResponse(text=text)

    def _traced(
        self,
        parts: RouterParts,
        request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest,
        context: CallContext,
    ) -> AbstractContextManager[RequestTrace | None]:
        if self._tracing is None:
            return nullcontext()
        return self._tracing.call(request, context.invocation_metadata() or (), parts.facts.names)

    async def _admitted(
        self, held: ExitStack, parts: RouterParts, valid: ValidGeneration, caller: Caller, *, waits: bool
    ) -> tuple[Charge, RateCharge]:
        """Charge the call in the ledger and to its limits per minute. `held` ends the charges. Raises Overloaded or
        RateLimited."""
        outputs = valid.sampling.num_sequences
        max_tokens = valid.sampling.max_tokens
        generated_tokens = outputs * (parts.max_model_len if max_tokens is None else max_tokens)
        while True:
            charged = self.bounds.charged(
                caller,
                valid.estimated_tokens,
                parts.ledger,
                outputs=outputs,
                generated_tokens=generated_tokens,
            )
            try:
                return held.enter_context(charged)
            except Overloaded as refusal:
                if not waits or refusal.retry_after_seconds is None:
                    raise
                await asyncio.sleep(refusal.retry_after_seconds)

    async def deliver(
        self,
        run: Run,
        write: Callable[[Delta], Awaitable[None]],
        write_now: Callable[[Delta], bool] = lambda delta: False,
    ) -> None:
        """Run a request and write all its deltas, merged where the client reads slowly.

        `write_now` writes a delta if it need not wait, and returns whether it did. Raises SlowReader, in a group.
        """
        await deliver(
            run,
            write,
            write_now=write_now,
            slow_reader_seconds=self.slow_reader_seconds,
            budget=self._writes,
        )


@contextmanager
def _counted(rate: RateCharge, record: RequestRecord) -> Iterator[None]:
    """Count the request's prompt and generated tokens against the limits per minute when the context ends.

    A request that is refused for lack of room or workers, before it has a token, counts nothing.
    """
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
