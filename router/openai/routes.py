"""Routes: paths, permissions, and the end of every request.

A request ends with an answer, an error, or nothing for a client that is gone. A route stands for a gRPC method, so one
table (admission/auth.py) has all permissions. Does not own what a route does (completions.py, tokens.py, about.py).
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp.web import BaseRequest, StreamResponse
from blockyard.proto.naming.headers import ANTHROPIC_REQUEST_ID
from blockyard.router.admission.loop_budget import LoopBudget
from blockyard.router.calls.gate import CallGate, answer_to
from blockyard.router.calls.generating import ARRIVALS_PER_TICK, Calls
from blockyard.router.calls.intake import Intake
from blockyard.router.errors import is_gone
from blockyard.router.openai.about import AboutRouter, AboutRoutes
from blockyard.router.openai.answers.chat_face import chat_asked
from blockyard.router.openai.answers.face import Asked
from blockyard.router.openai.anthropic.errors import anthropic_response
from blockyard.router.openai.anthropic.face import counted_tokens, messages_asked
from blockyard.router.openai.batches import paths as batch_paths
from blockyard.router.openai.batches.handlers import BatchRoutes
from blockyard.router.openai.batches.line_calls import LineCalls
from blockyard.router.openai.completions import Completions
from blockyard.router.openai.embeddings import embeddings
from blockyard.router.openai.http.body import read_json
from blockyard.router.openai.http.call import (
    CallNotes,
    HttpCall,
    call_id,
    call_metadata,
    drawn_id,
    http_call,
    own_headers,
)
from blockyard.router.openai.http.cors import cors_headers, preflight
from blockyard.router.openai.http.errors import BatchesOff, MethodNotAllowed, NoSuchRoute
from blockyard.router.openai.http.json_response import error_response, json_body_response, json_response
from blockyard.router.openai.http.rate_headers import rate_headers
from blockyard.router.openai.http.sse import EventStream
from blockyard.router.openai.line_routes import embedded, generated, responded
from blockyard.router.openai.openapi import INPUT_ITEMS, MODELS, PATHS, RESPONSE, RESPONSES
from blockyard.router.openai.requests import embedding as embedding_request
from blockyard.router.openai.requests.chat import chat_wanted
from blockyard.router.openai.requests.completion import completion_wanted
from blockyard.router.openai.requests.fields import Body
from blockyard.router.openai.responses.stored import Responses
from blockyard.router.openai.tokens import detokenized, tokenized

MODEL = f"{MODELS}/{{model}}"
MESSAGES = "/v1/messages"
_PATTERNS = {
    MODEL: re.compile(f"{MODELS}/.*"),
    RESPONSE: re.compile(f"{RESPONSES}/[^/]+"),
    INPUT_ITEMS: re.compile(f"{RESPONSES}/[^/]+/input_items"),
}
"""Paths with a name in them. That of a model may have slashes."""
Handler = Callable[[BaseRequest, CallNotes], Awaitable[StreamResponse]]
Ask = Callable[[Body, HttpCall], Awaitable[Asked]]
"""Checks the body of a call that generates."""


@dataclass(frozen=True, slots=True)
class _Route:
    method: str
    """gRPC method whose permissions the route has."""
    handler: Handler
    also: Mapping[str, Handler] = field(default_factory=dict)
    """Handlers of other verbs, by verb."""


class Routes:
    """Handler of all requests of one gateway."""

    def __init__(
        self,
        calls: Calls,
        gate: CallGate,
        intake: Intake,
        about: AboutRouter,
        cors_origins: Sequence[str],
        batch_dir: Path | None,
    ) -> None:
        self._calls, self._gate, self._intake = calls, gate, intake
        self._cors_origins = cors_origins
        self._completions = Completions(calls)
        groups = calls.groups
        responses = Responses(calls)
        self._arrivals = LoopBudget(ARRIVALS_PER_TICK)
        about_routes = AboutRoutes(calls, about)
        generates, embeds, lists, tokenizes, detokenizes = (
            f"/blockyard.v1.InferenceService/{name}"
            for name in ("GenerateStream", "Embed", "ListModels", "Tokenize", "Detokenize")
        )
        health, info = "/grpc.health.v1.Health/Check", "/blockyard.v1.ClusterService/GetClusterInfo"
        asks: Mapping[str, Callable[[Body], Asked]] = {
            "/v1/chat/completions": chat_asked("chat", chat_wanted, groups),
            "/v1/completions": chat_asked(
                "completions", lambda body, answers: completion_wanted(body), groups
            ),
        }
        lines = LineCalls(
            {
                **{path: generated(self._completions, ask) for path, ask in asks.items()},
                "/v1/embeddings": embedded(calls),
                RESPONSES: responded(self._completions, responses.asked),
            }
        )
        self.batches = BatchRoutes(batch_dir, calls, lines, intake) if batch_dir is not None else None
        self._routes: Mapping[str, _Route] = {
            **{path: _Route(generates, self._generating(_at_once(ask))) for path, ask in asks.items()},
            "/v1/embeddings": _Route(embeds, self._embedding),
            RESPONSES: _Route(generates, self._generating(responses.asked)),
            RESPONSE: _Route(generates, responses.get, also={"DELETE": responses.delete}),
            INPUT_ITEMS: _Route(generates, responses.input_items),
            MESSAGES: _Route(generates, self._generating(messages_asked(groups))),
            f"{MESSAGES}/count_tokens": _Route(tokenizes, self._answering(counted_tokens)),
            **{path: _Route(generates, handler) for path, handler in self._batch_handlers().items()},
            MODELS: _Route(lists, about_routes.models),
            MODEL: _Route(lists, about_routes.model),
            "/tokenize": _Route(tokenizes, self._answering(tokenized)),
            "/detokenize": _Route(detokenizes, self._answering(detokenized)),
            "/version": _Route(lists, about_routes.version),
            "/metrics": _Route(info, about_routes.metrics),
            "/health": _Route(health, about_routes.health),
            "/openapi.json": _Route(lists, about_routes.document),
            "/docs": _Route(lists, about_routes.page),
            # It holds nothing of the cluster, and a browser sends no token with its first request.
            "/": _Route(health, about_routes.chat_page),
        }

    async def __call__(self, request: BaseRequest) -> StreamResponse:
        notes = CallNotes(request_id=drawn_id())
        try:
            # Before authentication: a browser sends no token with a preflight.
            response: StreamResponse | None = preflight(self._cors_origins, request)
            if response is None:
                path = self._admitted(request)
                notes.request_id = call_id(request)
                response = await self._answer(path, request, notes)
        except asyncio.CancelledError as error:
            await self._gate.free(error)
            raise
        except Exception as error:
            if is_gone(error):
                raise ConnectionError("the client has gone") from None
            # In the log an unknown path, as the client's own text, must not appear.
            answer = answer_to(error, self._path(request.path) or "a path")
            if _is_anthropic(request):
                response = anthropic_response(answer, notes.request_id, notes.names)
            else:
                response = error_response(answer, notes.names)
        await self._finish(request, response, notes)
        return response

    def _admitted(self, request: BaseRequest) -> str | None:
        """Authenticate the caller before anything else, and return the path, or None for an unknown one.

        Raises Unauthenticated or Forbidden.
        """
        path = self._path(request.path)
        # An unknown path needs a token too, so a caller without one learns nothing.
        self._gate.admit(self._routes[path or MODELS].method, call_metadata(request))
        return path

    async def _answer(self, path: str | None, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        if path is None:
            raise NoSuchRoute("no such path: /openapi.json lists all")
        route, verbs = self._routes[path], PATHS[path].verbs
        if request.method not in verbs:
            allowed = ", ".join(verbs)
            raise MethodNotAllowed(f"this path allows only {allowed}", metadata={"allow": allowed})
        return await route.also.get(request.method, route.handler)(request, notes)

    def _path(self, path: str) -> str | None:
        """Return the path as in the table of routes, or None if it is not there."""
        if path in self._routes and "{" not in path:
            return path
        known = next((known for known, pattern in _PATTERNS.items() if pattern.fullmatch(path)), None)
        return known or batch_paths.known_path(path)

    def _generating(self, ask: Ask) -> Handler:
        async def handle(request: BaseRequest, notes: CallNotes) -> StreamResponse:
            await self._arrivals.take()
            call, body = await self._read(request)
            asked = await ask(body, call)
            notes.ignored, notes.names = asked.wanted.answering.ignored, asked.wanted.names
            events = EventStream(
                request,
                slow_reader_seconds=self._calls.slow_reader_seconds,
                headed=lambda response: self._headed(response, request, notes),
            )
            return await self._completions.answer(asked, call, notes.request_id, events)

        return handle

    def _batch_handlers(self) -> dict[str, Handler]:
        batches = self.batches
        if batches is None:
            return dict.fromkeys(batch_paths.ALL, _batches_are_off)
        return {
            batch_paths.FILES: batches.files,
            batch_paths.FILE: batches.file,
            batch_paths.CONTENT: partial(batches.content, headed=self._headed),
            batch_paths.BATCHES: batches.batches,
            batch_paths.BATCH: batches.batch,
            batch_paths.CANCEL: batches.cancel,
        }

    async def _embedding(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        await self._arrivals.take()
        call, body = await self._read(request)
        notes.names = embedding_request.NAMES
        wanted = embedding_request.embeddings_wanted(body)
        notes.ignored = wanted.ignored
        return json_body_response(await embeddings(self._calls, wanted, call, notes.request_id))

    def _answering(self, answer: Callable[[Calls, Body, HttpCall], Awaitable[dict[str, Any]]]) -> Handler:
        async def handle(request: BaseRequest, notes: CallNotes) -> StreamResponse:
            call, body = await self._read(request)
            notes.names = {
                "token_ids": "tokens",
                "input": "prompt" if body.get("messages") is None else "messages",
            }
            return json_response(await answer(self._calls, body, call))

        return handle

    async def _read(self, request: BaseRequest) -> tuple[HttpCall, Body]:
        call = http_call(request, default_timeout_seconds=self._calls.bounds.default_timeout_seconds)
        with self._intake.charge(call.peer()) as charge:
            return call, await read_json(request, charge, max_model_len=self._calls.groups.max_model_len)

    async def _finish(self, request: BaseRequest, response: StreamResponse, notes: CallNotes) -> None:
        """Send a response that has not begun. Cut off a client that does not read it in time."""
        if response.prepared:
            return
        self._headed(response, request, notes)
        try:
            async with asyncio.timeout(self._calls.slow_reader_seconds):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()

    def _headed(self, response: StreamResponse, request: BaseRequest, notes: CallNotes) -> None:
        response.headers.update(own_headers(notes) | cors_headers(self._cors_origins, request))
        if _is_anthropic(request):
            response.headers[ANTHROPIC_REQUEST_ID] = notes.request_id
        if request.method == "POST":
            response.headers.update(rate_headers(self._calls.bounds, request))
        if self._calls.groups.registry.is_draining:
            # The client's next request should reach another router.
            response.force_close()


async def _batches_are_off(request: BaseRequest, notes: CallNotes) -> StreamResponse:
    raise BatchesOff("batches are off: this server was started without --batch-dir")


def _at_once(ask: Callable[[Body], Asked]) -> Ask:
    async def asked(body: Body, call: HttpCall) -> Asked:
        return ask(body)

    return asked


def _is_anthropic(request: BaseRequest) -> bool:
    """Return True for the paths of Anthropic's API, whose errors have another form."""
    return request.path == MESSAGES or request.path.startswith(f"{MESSAGES}/")
