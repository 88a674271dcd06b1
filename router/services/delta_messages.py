"""Response messages: deltas as stream messages, or gathered into one response."""

from dataclasses import dataclass, field

from blockyard.proto.naming.pooling import Pooling
from blockyard.proto.v1 import inference_pb2
from blockyard.router.generation.client_buffer import Delta, Run
from blockyard.router.generation.embedding import only_delta, sized


def stream_response(request_id: str, delta: Delta) -> inference_pb2.GenerateStreamResponse:
    return inference_pb2.GenerateStreamResponse(
        request_id=request_id,
        delta=inference_pb2.OutputDelta(
            text=delta.text,
            token_ids=delta.token_ids,
            token_offset=delta.token_offset,
            index=delta.index,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            prompt_token_ids=delta.prompt_token_ids,
        ),
        finish=delta.finish,
    )


async def embed_response(
    request_id: str, run: Run, dimensions: int | None, pooling: Pooling
) -> inference_pb2.EmbedResponse:
    """Run a request for an embedding and return the response."""
    delta = await only_delta(run)
    finish = delta.finish
    assert finish is not None, "an embedding ends its request"
    return inference_pb2.EmbedResponse(
        request_id=request_id,
        embedding=sized(delta.embedding, dimensions, pooling),
        usage=finish.usage,
        timing=finish.timing,
        worker_id=finish.worker_id,
        migrations=finish.migrations,
    )


@dataclass(slots=True)
class _Gathered:
    """Pieces of one output that have arrived."""

    message: inference_pb2.Output
    texts: list[str] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.message.token_ids.extend(delta.token_ids)
        self.message.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.message.finish.CopyFrom(delta.finish)

    def whole(self) -> inference_pb2.Output:
        self.message.text = "".join(self.texts)
        return self.message


async def gathered(request_id: str, run: Run) -> inference_pb2.GenerateResponse:
    """Run a request and gather all its deltas into one response, with its outputs in order of index.

    The first output is repeated in the response's older fields, which hold a single one.
    """
    response = inference_pb2.GenerateResponse(request_id=request_id)
    outputs: dict[int, _Gathered] = {}

    def gather(delta: Delta) -> None:
        if delta.index not in outputs:
            outputs[delta.index] = _Gathered(inference_pb2.Output(index=delta.index))
        outputs[delta.index].add(delta)
        response.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.prompt_token_ids and not response.prompt_token_ids:
            response.prompt_token_ids.extend(delta.prompt_token_ids)

    await run(gather)
    response.outputs.extend(outputs[index].whole() for index in sorted(outputs))
    first = response.outputs[0]
    response.text = first.text
    response.token_ids.extend(first.token_ids)
    response.finish.CopyFrom(first.finish)
    return response
