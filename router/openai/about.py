"""Routes about the router itself: the model, health, version, metrics, and the API's document."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp.web import BaseRequest, Response
from blockyard.proto.metrics.prometheus import CONTENT_TYPE
from blockyard.proto.v1 import inference_pb2
from blockyard.router.calls.generating import Calls
from blockyard.router.openai.chat_page import chat_page
from blockyard.router.openai.http.call import CallNotes, http_call
from blockyard.router.openai.http.json_response import encoded, json_response
from blockyard.router.openai.openapi import MODELS, PAGE_HEADERS, document, page
from blockyard.router.request.validation import check_model_name
from blockyard.router.services.inference import model_message, model_messages


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutRouter:
    """Facts about the router that the routes report."""

    version: str
    started: int
    """Start of the router in Unix seconds."""
    exposition: Callable[[], bytes]
    """Returns the router's metrics as Prometheus text."""


class AboutRoutes:
    """Handlers of the GET routes."""

    def __init__(self, calls: Calls, about: AboutRouter) -> None:
        self._groups, self._bounds, self._about = calls.groups, calls.bounds, about
        self._document = encoded(document(about.version))
        self._page = page(about.version).encode()
        self._chat_page, self._chat_headers = chat_page()

    async def models(self, request: BaseRequest, notes: CallNotes) -> Response:
        models = [self._model_object(model) for model in model_messages(self._groups, self._tenant(request))]
        return json_response({"object": "list", "data": models})

    async def model(self, request: BaseRequest, notes: CallNotes) -> Response:
        name = request.path.removeprefix(f"{MODELS}/")
        group, tenant = self._groups.of(name), self._tenant(request)
        message = model_message(group.parts)
        if name in group.parts.facts.names or group.parts.adapters.registry.find(name, tenant) is None:
            check_model_name(name, self._groups.names)
        else:
            message.parent, message.id = message.id, name
        return json_response(self._model_object(message))

    def _tenant(self, request: BaseRequest) -> str:
        return self._bounds.caller(http_call(request, default_timeout_seconds=1.0)).tenant

    async def health(self, request: BaseRequest, notes: CallNotes) -> Response:
        if self._groups.registry.is_draining:
            return json_response({"status": "draining"}, status=503)
        is_ready = self._groups.num_ready_workers > 0
        idle = [group.model.id for group in self._groups if not group.num_ready_workers]
        status = {"status": "serving" if is_ready else "no workers"}
        return json_response(
            {**status, **({"models_without_workers": idle} if idle else {})}, status=200 if is_ready else 503
        )

    async def version(self, request: BaseRequest, notes: CallNotes) -> Response:
        return json_response({"version": self._about.version})

    async def metrics(self, request: BaseRequest, notes: CallNotes) -> Response:
        return Response(body=self._about.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def document(self, request: BaseRequest, notes: CallNotes) -> Response:
        return Response(body=self._document, content_type="application/json", charset="utf-8")

    async def page(self, request: BaseRequest, notes: CallNotes) -> Response:
        return Response(body=self._page, headers=PAGE_HEADERS)

    async def chat_page(self, request: BaseRequest, notes: CallNotes) -> Response:
        return Response(body=self._chat_page, headers=self._chat_headers)

    def _model_object(self, model: inference_pb2.Model) -> dict[str, Any]:
        """Return a model as OpenAI's JSON, with `max_model_len` and an adapter's `parent` as vLLM adds them, and the
        size of its embeddings if it has any. `created` is the router's start."""
        return {
            "id": model.id,
            "object": "model",
            "created": self._about.started,
            "owned_by": "blockyard",
            "max_model_len": model.max_model_len,
            **({"parent": model.parent} if model.HasField("parent") else {}),
            **({"embedding_size": model.embedding_size} if model.embedding_size else {}),
        }
