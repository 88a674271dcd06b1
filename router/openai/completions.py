"""Completions: answers a checked call of any API by the same rules as gRPC's calls. The API is one face of the answer.

Owns the way of a call's deltas into its answer. Does not own the answer's form (answers/face.py).
"""

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
from blockyard.router.openai.answers.choices import shows_special
from blockyard.router.openai.answers.face import Asked, Face, Head
from blockyard.router.openai.answers.outputs import outputs
from blockyard.router.openai.http.call import HttpCall
from blockyard.router.openai.http.json_response import json_response
from blockyard.router.openai.http.sse import EventStream
from blockyard.router.openai.requests.echo import echoed
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.services.delta_messages import gathered


class Completions:
    """Answers the calls of one gateway that generate."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def answer(
        self, asked: Asked, call: HttpCall, request_id: str, events: EventStream
    ) -> StreamResponse:
        """Run one call and answer it, by `events` if it streams.

        Raises RouterErrors, also in groups, but only before anything has been sent.
        """
        if not asked.wanted.answering.streams:
            return json_response(await self.whole(asked, call, request_id))
        return await self._stream(events, call, asked.wanted, self._begun(asked, request_id))

    async def whole(self, asked: Asked, call: HttpCall, request_id: str) -> dict[str, Any]:
        """Run one call and return its answer as one value. Raises RouterErrors, also in groups."""
        face = self._begun(asked, request_id)
        async with self._outputs(asked.wanted, call) as run:
            outputs = (await gathered(request_id, face.tally.of(run))).outputs
        return await face.whole(outputs)

    def _begun(self, asked: Asked, request_id: str) -> Face:
        asked.wanted.named(request_id)
        # Each of several prompts has a task and an id of its own. Log lines about the whole call have this id.
        REQUEST_ID.set(request_id)
        named = asked.wanted.requests[0].model
        facts = self._calls.groups.of(named).parts.facts
        # An answer has the model's id under all its names, and an adapter's own name. Other names are refused.
        model = facts.name if not named or named in facts.names else named
        return asked.face(Head(request_id=request_id, model=model, created=int(time.time())))

    async def _stream(
        self, events: EventStream, call: HttpCall, wanted: Wanted, face: Face
    ) -> StreamResponse:
        try:
            await self._events(events, call, wanted, face)
            await events.end(await face.end())
        except TimeoutError:
            events.cut_off()
        except Exception as error:
            if not events.has_begun:
                raise
            await self._broken(events, error, face)
        return events.response

    async def _events(self, events: EventStream, call: HttpCall, wanted: Wanted, face: Face) -> None:
        """Send the events of each delta."""

        async def write(delta: Delta) -> None:
            if encoded := face.events(delta):
                await events.send(encoded)

        def write_now(delta: Delta) -> bool:
            if not events.is_open:
                return False
            if encoded := face.events(delta):
                events.send_now(encoded)
            return True

        async with self._outputs(wanted, call) as run:
            await self._calls.deliver(run, write, write_now)

    @asynccontextmanager
    async def _outputs(self, wanted: Wanted, call: HttpCall) -> AsyncIterator[Run]:
        """Yield the function that runs all prompts, with each prompt before its outputs if the call wants an echo."""
        async with outputs(
            self._calls,
            wanted.requests,
            call,
            outputs_a_prompt=wanted.outputs_a_prompt,
            sequences_a_prompt=wanted.sequences_a_prompt,
            parsed=None if wanted.reading is None else wanted.reading.format,
        ) as run:
            if wanted.echo is None:
                yield run
                return
            skip_special = not shows_special(wanted)

            tokenizing = self._calls.groups.of(wanted.requests[0].model).parts.tokenizing

            def text_of(token_ids: Sequence[int]) -> str:
                return tokenizing.detokenize(token_ids, skip_special=skip_special)

            yield echoed(run, wanted.echo, wanted.prompts, wanted.outputs_a_prompt, text_of)

    async def _broken(self, events: EventStream, error: Exception, face: Face) -> None:
        """End a stream that has begun with the error as its last event. Cut off a client that does not read."""
        if is_gone(error):
            return
        answer = answer_to(error, "a stream over HTTP")
        if isinstance(answer, SlowReader):
            events.cut_off()
            return
        try:
            await events.end(face.failed(answer))
        except (TimeoutError, ConnectionError):
            events.cut_off()
