"""Completions: answers a checked call of /v1/chat/completions or /v1/completions by the same rules as gRPC's calls."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp.web import StreamResponse
from blockyard.proto.runtime.logs import REQUEST_ID
from blockyard.router.calls.gate import answer_to
from blockyard.router.calls.generating import Calls
from blockyard.router.errors import SlowReader, is_gone
from blockyard.router.generation.client_buffer import Delta, Run
from blockyard.router.openai.answers.choices import Choices, choices_of, shows_special
from blockyard.router.openai.answers.envelope import Chunks, Envelope, Tally
from blockyard.router.openai.answers.outputs import outputs
from blockyard.router.openai.answers.token_texts import TokenTexts
from blockyard.router.openai.http.call import HttpCall
from blockyard.router.openai.http.errors import error_body
from blockyard.router.openai.http.json_response import json_response
from blockyard.router.openai.http.sse import EventStream
from blockyard.router.openai.requests.echo import echoed
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.services.delta_messages import gathered


class Completions:
    """Answers the completion calls of one gateway."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._texts = TokenTexts(calls.parts.tokenizing.tokenizer)

    async def answer(
        self, wanted: Wanted, call: HttpCall, request_id: str, events: EventStream
    ) -> StreamResponse:
        """Run one call and answer it, by `events` if it streams.

        Raises RouterErrors, also in groups, but only before anything has been sent.
        """
        if not wanted.answering.streams:
            return json_response(await self.whole(wanted, call, request_id))
        envelope = self._begun(wanted, request_id)
        return await self._stream(events, call, envelope, choices_of(wanted, self._texts))

    async def whole(self, wanted: Wanted, call: HttpCall, request_id: str) -> dict[str, Any]:
        """Run one call and return its answer as one value. Raises RouterErrors, also in groups."""
        envelope = self._begun(wanted, request_id)
        choices = choices_of(wanted, self._texts)
        tally = Tally(wanted.outputs_a_prompt)
        async with self._outputs(wanted, call) as run:
            whole = await gathered(request_id, tally.of(run))
        return envelope.whole([choices.whole(output, tally.prompt_end) for output in whole.outputs], tally)

    def _begun(self, wanted: Wanted, request_id: str) -> Envelope:
        wanted.named(request_id)
        # Each of several prompts has a task and an id of its own. Log lines about the whole call have this id.
        REQUEST_ID.set(request_id)
        return Envelope(
            wanted=wanted, request_id=request_id, model=self._calls.parts.facts.name, created=int(time.time())
        )

    async def _stream(
        self, events: EventStream, call: HttpCall, envelope: Envelope, choices: Choices
    ) -> StreamResponse:
        try:
            last = await self._events(events, call, envelope, choices)
            await events.end(*last, is_whole=True)
        except TimeoutError:
            events.cut_off()
        except Exception as error:
            if not events.has_begun:
                raise
            await self._broken(events, error, envelope.wanted)
        return events.response

    async def _events(
        self, events: EventStream, call: HttpCall, envelope: Envelope, choices: Choices
    ) -> list[dict[str, Any]]:
        """Send an event per delta, and return the values of the events that end the stream."""
        wanted = envelope.wanted
        tally = Tally(wanted.outputs_a_prompt)
        chunks = Chunks(envelope=envelope, choices=choices, tally=tally)

        async def write(delta: Delta) -> None:
            if chunk := chunks.encoded(delta):
                await events.send(chunk)

        def write_now(delta: Delta) -> bool:
            if not events.is_open:
                return False
            if chunk := chunks.encoded(delta):
                events.send_now(chunk)
            return True

        async with self._outputs(wanted, call) as run:
            await self._calls.deliver(run, write, write_now)
        return [envelope.usage_chunk(tally)] if wanted.answering.includes_usage else []

    @asynccontextmanager
    async def _outputs(self, wanted: Wanted, call: HttpCall) -> AsyncIterator[Run]:
        """Yield the function that runs all prompts, with each prompt before its outputs if the call wants an echo."""
        async with outputs(self._calls, wanted, call) as run:
            if wanted.echo is None:
                yield run
                return
            skip_special = not shows_special(wanted)

            def text_of(token_ids: Sequence[int]) -> str:
                return self._calls.parts.tokenizing.detokenize(token_ids, skip_special=skip_special)

            yield echoed(run, wanted.echo, wanted.prompts, wanted.outputs_a_prompt, text_of)

    async def _broken(self, events: EventStream, error: Exception, wanted: Wanted) -> None:
        """End a stream that has begun with the error as its last event. Cut off a client that does not read."""
        if is_gone(error):
            return
        answer = answer_to(error, "a stream over HTTP")
        if isinstance(answer, SlowReader):
            events.cut_off()
            return
        try:
            await events.end(error_body(answer, wanted.names), is_whole=False)
        except (TimeoutError, ConnectionError):
            events.cut_off()
