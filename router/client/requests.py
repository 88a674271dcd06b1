"""Every RPC that the clients make, as a value: its path, its request from keyword arguments, its response type.

Pure: opens no connection. How it is sent and retried is in retry.py, sync.py and aio.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar

from blockyard.proto.v1 import cluster_pb2, inference_pb2
from google.protobuf.message import Message

Response = TypeVar("Response", bound=Message)
Messages = Sequence[Mapping[str, str]]
"""A chat: [{"role": "user", "content": "..."}, ...]."""

BLOCKS_PER_PAGE = 1000
_SAMPLING_FIELDS = frozenset(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Response]):
    """One RPC to make: where, with what, and what comes back."""

    path: str
    request: Message
    response_type: type[Response]


def serialize(request: Message) -> bytes:
    return request.SerializeToString()


class GenerateArguments(TypedDict, total=False):
    """The keyword arguments of generate() and stream(). None or absent leaves the server's default."""

    messages: Messages | None
    prompt_token_ids: Sequence[int] | None
    model: str | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    request_id: str | None
    cache_salt: str | None


class PromptArguments(TypedDict, total=False):
    """The keyword arguments that name a prompt, of lookup_prefix() and explain_placement()."""

    messages: Messages | None
    prompt_token_ids: Sequence[int] | None
    cache_salt: str | None


def generate_stream(
    prompt: str | None, arguments: GenerateArguments
) -> Call[inference_pb2.GenerateStreamResponse]:
    """Raises ValueError or TypeError for arguments that no server could accept."""
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    fields = _prompt_fields(prompt, given.pop("messages", None), given.pop("prompt_token_ids", None))
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    sampling = {name: given.pop(name) for name in list(given) if name in _SAMPLING_FIELDS}
    fields |= {name: given.pop(name) for name in ("model", "request_id", "cache_salt") if name in given}
    if given:
        raise TypeError(f"unknown arguments: {', '.join(sorted(given))}")
    request = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(**sampling), **fields)
    return _inference("GenerateStream", request, inference_pb2.GenerateStreamResponse)


def tokenize(
    prompt: str | None, messages: Messages | None, model: str | None
) -> Call[inference_pb2.TokenizeResponse]:
    request = inference_pb2.TokenizeRequest(model=model, **_prompt_fields(prompt, messages, None))
    return _inference("Tokenize", request, inference_pb2.TokenizeResponse)


def detokenize(token_ids: Sequence[int], model: str | None) -> Call[inference_pb2.DetokenizeResponse]:
    request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
    return _inference("Detokenize", request, inference_pb2.DetokenizeResponse)


def list_models() -> Call[inference_pb2.ListModelsResponse]:
    return _inference("ListModels", inference_pb2.ListModelsRequest(), inference_pb2.ListModelsResponse)


def abort(request_id: str) -> Call[inference_pb2.AbortResponse]:
    request = inference_pb2.AbortRequest(request_id=request_id)
    return _inference("Abort", request, inference_pb2.AbortResponse)


def cluster_info() -> Call[cluster_pb2.ClusterInfo]:
    return _cluster("GetClusterInfo", cluster_pb2.GetClusterInfoRequest(), cluster_pb2.ClusterInfo)


def list_workers() -> Call[cluster_pb2.ListWorkersResponse]:
    return _cluster("ListWorkers", cluster_pb2.ListWorkersRequest(), cluster_pb2.ListWorkersResponse)


def watch_workers() -> Call[cluster_pb2.ListWorkersResponse]:
    return _cluster("WatchWorkers", cluster_pb2.WatchWorkersRequest(), cluster_pb2.ListWorkersResponse)


def block_pool(worker_id: str) -> Call[cluster_pb2.BlockPool]:
    return _cluster(
        "GetBlockPool", cluster_pb2.GetBlockPoolRequest(worker_id=worker_id), cluster_pb2.BlockPool
    )


def list_blocks(worker_id: str, page_token: str) -> Call[cluster_pb2.ListBlocksResponse]:
    request = cluster_pb2.ListBlocksRequest(
        worker_id=worker_id, page_size=BLOCKS_PER_PAGE, page_token=page_token
    )
    return _cluster("ListBlocks", request, cluster_pb2.ListBlocksResponse)


def lookup_prefix(prompt: str | None, arguments: PromptArguments) -> Call[cluster_pb2.LookupPrefixResponse]:
    request = cluster_pb2.LookupPrefixRequest(**_salted_prompt_fields(prompt, arguments))
    return _cluster("LookupPrefix", request, cluster_pb2.LookupPrefixResponse)


def explain_placement(
    prompt: str | None, arguments: PromptArguments
) -> Call[cluster_pb2.ExplainPlacementResponse]:
    request = cluster_pb2.ExplainPlacementRequest(**_salted_prompt_fields(prompt, arguments))
    return _cluster("ExplainPlacement", request, cluster_pb2.ExplainPlacementResponse)


def list_requests() -> Call[cluster_pb2.ListRequestsResponse]:
    return _cluster("ListRequests", cluster_pb2.ListRequestsRequest(), cluster_pb2.ListRequestsResponse)


def _inference(name: str, request: Message, response_type: type[Response]) -> Call[Response]:
    path = f"/blockyard.v1.InferenceService/{name}"
    return Call(path=path, request=request, response_type=response_type)


def _cluster(name: str, request: Message, response_type: type[Response]) -> Call[Response]:
    path = f"/blockyard.v1.ClusterService/{name}"
    return Call(path=path, request=request, response_type=response_type)


def _salted_prompt_fields(prompt: str | None, arguments: PromptArguments) -> dict[str, Any]:
    fields = _prompt_fields(prompt, arguments.get("messages"), arguments.get("prompt_token_ids"))
    return fields | {"cache_salt": arguments.get("cache_salt")}


def _prompt_fields(
    prompt: str | None, messages: Messages | None, prompt_token_ids: Sequence[int] | None
) -> dict[str, Any]:
    """The request's `input`. Raises ValueError unless exactly one is given."""
    if [prompt, messages, prompt_token_ids].count(None) != 2:
        raise ValueError("give exactly one of prompt, messages and prompt_token_ids")
    if prompt is not None:
        return {"prompt": prompt}
    if prompt_token_ids is not None:
        return {"prompt_token_ids": inference_pb2.TokenIds(ids=prompt_token_ids)}
    assert messages is not None
    chat = [inference_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
    return {"chat": inference_pb2.Chat(messages=chat)}
