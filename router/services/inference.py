"""InferenceService: turns gRPC messages into domain calls (calls/generating.py) and back. Has no logic of its own.

Errors are raised. interceptor.py turns them into statuses.
"""

from blockyard.proto.naming.identifiers import NAME_RULE, is_id
from blockyard.proto.v1 import inference_pb2, inference_pb2_grpc
from blockyard.router.calls.generating import Calls
from blockyard.router.errors import InvalidRequest
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.generation.generation import RouterParts
from blockyard.router.model_groups import ModelGroups
from blockyard.router.services.delta_messages import embed_response, gathered, stream_response
from blockyard.router.services.interceptor import Context, write


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """InferenceService of one router."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._groups, self._bounds = calls.groups, calls.bounds

    async def GenerateStream(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        async with self._calls.deltas(request, context) as (request_id, run):

            async def write_delta(delta: Delta) -> None:
                await write(context, stream_response(request_id, delta))

            await self._calls.deliver(run, write_delta)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        async with self._calls.deltas(request, context) as (request_id, run):
            return await gathered(request_id, run)

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        async with self._calls.deltas(request, context) as (request_id, run):
            pooling = self._groups.of(request.model).parts.facts.pooling
            assert pooling is not None, "a model that generates has been refused"
            dimensions = request.dimensions if request.HasField("dimensions") else None
            return await embed_response(request_id, run, dimensions, pooling)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        return await self._calls.tokenize(request, context)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        return await self._calls.detokenize(request, context)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        tenant = self._bounds.caller(context).tenant
        return inference_pb2.ListModelsResponse(models=model_messages(self._groups, tenant))

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        if not is_id(request.request_id):
            raise InvalidRequest.of("request_id", f"must be {NAME_RULE}, not empty")
        self._groups.registry.abort(request.request_id, realm=self._bounds.caller(context).realm)
        return inference_pb2.AbortResponse()


def model_messages(groups: ModelGroups, tenant: str) -> list[inference_pb2.Model]:
    """Return each model under each of its names, its id first, and the adapters of it that a tenant sees.

    A name that both have means the model.
    """
    messages = []
    for group in groups:
        parts = group.parts
        messages += [model_message(parts, name) for name in parts.facts.names]
        for adapter in parts.adapters.registry.listed(tenant):
            if adapter.name not in groups.names:
                messages.append(model_message(parts, adapter.name))
                messages[-1].parent = parts.facts.name
    return messages


def model_message(parts: RouterParts, name: str = "") -> inference_pb2.Model:
    """Return a model under one of its names, or under its id. Its block_size is 0 until its first worker has come."""
    identity = parts.fleet.identity
    return inference_pb2.Model(
        id=name or parts.facts.name,
        max_model_len=parts.max_model_len,
        vocab_size=parts.facts.vocab_size,
        block_size=identity.block_size if identity else 0,
        embedding_size=parts.facts.embedding_size,
    )
