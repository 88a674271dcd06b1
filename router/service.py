"""InferenceService: gRPC messages to domain calls (calls.py) and back. No logic of its own.

Errors are raised, never set: interceptor.py turns them into statuses.
"""

from blockyard.proto.block_hash import unpack_tokens
from blockyard.proto.v1 import inference_pb2, inference_pb2_grpc
from blockyard.router.answers import gathered, stream_response
from blockyard.router.calls import Calls
from blockyard.router.errors import InvalidRequest
from blockyard.router.generation import RouterParts, tokenise
from blockyard.router.interceptor import Context
from blockyard.router.output import Delta
from blockyard.router.validation import check_detokenize, check_model, is_name, prompt_estimate, valid_prompt


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """One for each router."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._parts, self._bounds = calls.parts, calls.bounds

    async def GenerateStream(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        async with self._calls.deltas(request, context) as (request_id, deltas):

            async def write(delta: Delta) -> None:
                await context.write(stream_response(request_id, delta))

            await self._calls.deliver(deltas, write)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        async with self._calls.deltas(request, context) as (request_id, deltas):
            return await gathered(request_id, deltas)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        parts = self._parts
        check_model(request, parts.facts)
        prompt = valid_prompt(request, parts.facts, max_model_len=parts.max_model_len)
        async with self._bounds.admitted(context, prompt_estimate(prompt)) as charge:
            prepared = await tokenise(
                parts,
                prompt,
                charge,
                root=None,
                block_size=1,
                client=self._bounds.caller(context).client,
            )
        return inference_pb2.TokenizeResponse(
            token_ids=unpack_tokens(prepared.token_ids), max_model_len=parts.max_model_len
        )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        check_detokenize(request, self._parts.facts, max_model_len=self._parts.max_model_len)
        async with self._bounds.admitted(context, len(request.token_ids)):
            text = await self._parts.tokenizing.detokenize(list(request.token_ids))
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=model_messages(self._parts))

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        if not request.request_id or not is_name(request.request_id):
            raise InvalidRequest.of("request_id", "is required, as Generate allows it")
        self._parts.registry.abort(request.request_id, realm=self._bounds.caller(context).realm)
        return inference_pb2.AbortResponse()


def model_messages(parts: RouterParts) -> list[inference_pb2.Model]:
    """The one model of the cluster under each of its names, its id first."""
    model = model_message(parts)
    return [
        inference_pb2.Model(
            id=name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            block_size=model.block_size,
        )
        for name in parts.facts.names
    ]


def model_message(parts: RouterParts) -> inference_pb2.Model:
    """The one model of the cluster. Without any worker so far, block_size is 0: unknown."""
    identity = parts.fleet.identity
    return inference_pb2.Model(
        id=parts.facts.name,
        max_model_len=parts.max_model_len,
        vocab_size=parts.facts.vocab_size,
        block_size=identity.block_size if identity else 0,
    )
