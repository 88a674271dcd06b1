"""RPCs of the clients as values: each has its path, its request and its response type.

Pure: opens no connection. arguments.py has the arguments of generate(). retry.py and aio.py send and retry calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.router.client.arguments import (
    ChatArguments,
    EmbedArguments,
    GenerateArguments,
    LookupArguments,
    Messages,
    PlacementArguments,
    PromptArguments,
    embed_request,
    generate_request,
    lookup_request,
    message_of,
    placement_request,
    pull_request,
    tokenize_request,
)
from google.protobuf.message import Message

Response = TypeVar("Response", bound=Message)
BLOCKS_PER_PAGE = 1000
"""Blocks in one page of ListBlocks, and sequences in one page of ListSequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Response]):
    """One RPC to make: its path, its request and the type of its response."""

    path: str
    request: Message
    response_type: type[Response]


def serialize(request: Message) -> bytes:
    return request.SerializeToString()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall(Call[inference_pb2.GenerateStreamResponse]):
    num_outputs: int
    """Number of outputs that the stream must finish."""


def generate_stream(prompt: str | None, arguments: GenerateArguments) -> GenerateCall:
    """Return a GenerateStream call. Raises ValueError or TypeError for arguments that cannot be sent."""
    request = generate_request(prompt, arguments)
    return GenerateCall(
        path="/blockyard.v1.InferenceService/GenerateStream",
        request=request,
        response_type=inference_pb2.GenerateStreamResponse,
        num_outputs=max(request.sampling.n, 1),
    )


def embed(prompt: str | None, arguments: EmbedArguments) -> Call[inference_pb2.EmbedResponse]:
    return _inference("Embed", embed_request(prompt, arguments), inference_pb2.EmbedResponse)


def tokenize(
    prompt: str | None, messages: Messages | None, model: str | None, chat_arguments: ChatArguments
) -> Call[inference_pb2.TokenizeResponse]:
    request = tokenize_request(prompt, messages, model, chat_arguments)
    return _inference("Tokenize", request, inference_pb2.TokenizeResponse)


def detokenize(token_ids: Sequence[int], model: str | None) -> Call[inference_pb2.DetokenizeResponse]:
    request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
    return _inference("Detokenize", request, inference_pb2.DetokenizeResponse)


def list_models() -> Call[inference_pb2.ListModelsResponse]:
    return _inference("ListModels", inference_pb2.ListModelsRequest(), inference_pb2.ListModelsResponse)


def abort(request_id: str) -> Call[inference_pb2.AbortResponse]:
    request = message_of(inference_pb2.AbortRequest, "request_id", request_id)
    return _inference("Abort", request, inference_pb2.AbortResponse)


def cluster_info() -> Call[cluster_pb2.ClusterInfo]:
    return _cluster("GetClusterInfo", cluster_pb2.GetClusterInfoRequest(), cluster_pb2.ClusterInfo)


def index_info(model: str | None) -> Call[cluster_pb2.IndexInfo]:
    return _cluster("GetIndexInfo", cluster_pb2.GetIndexInfoRequest(model=model), cluster_pb2.IndexInfo)


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


def find_blocks(
    worker_id: str, block_ids: Sequence[int], names: Sequence[bytes]
) -> Call[cluster_pb2.FindBlocksResponse]:
    request = message_of(cluster_pb2.FindBlocksRequest, "block_ids", block_ids)
    request.MergeFrom(message_of(cluster_pb2.FindBlocksRequest, "names", names))
    request.worker_id = worker_id
    return _cluster("FindBlocks", request, cluster_pb2.FindBlocksResponse)


def list_sequences(worker_id: str, page_token: str) -> Call[cluster_pb2.ListSequencesResponse]:
    request = cluster_pb2.ListSequencesRequest(
        worker_id=worker_id, page_size=BLOCKS_PER_PAGE, page_token=page_token
    )
    return _cluster("ListSequences", request, cluster_pb2.ListSequencesResponse)


def one_sequence(worker_id: str, sequence_id: int) -> Call[cluster_pb2.ListSequencesResponse]:
    request = message_of(cluster_pb2.ListSequencesRequest, "sequence_id", sequence_id)
    request.worker_id = worker_id
    return _cluster("ListSequences", request, cluster_pb2.ListSequencesResponse)


def lookup_prefix(prompt: str | None, arguments: LookupArguments) -> Call[cluster_pb2.LookupPrefixResponse]:
    request = lookup_request(prompt, arguments)
    return _cluster("LookupPrefix", request, cluster_pb2.LookupPrefixResponse)


def explain_placement(
    prompt: str | None, arguments: PlacementArguments
) -> Call[cluster_pb2.ExplainPlacementResponse]:
    request = placement_request(prompt, arguments)
    return _cluster("ExplainPlacement", request, cluster_pb2.ExplainPlacementResponse)


def list_requests() -> Call[cluster_pb2.ListRequestsResponse]:
    return _cluster("ListRequests", cluster_pb2.ListRequestsRequest(), cluster_pb2.ListRequestsResponse)


def drain_worker(worker_id: str, grace_seconds: float, *, force: bool) -> Call[admin_pb2.DrainWorkerResponse]:
    request = admin_pb2.DrainWorkerRequest(worker_id=worker_id, grace_seconds=grace_seconds, force=force)
    return _admin("DrainWorker", request, admin_pb2.DrainWorkerResponse)


def resume_worker(worker_id: str) -> Call[admin_pb2.ResumeWorkerResponse]:
    return _admin(
        "ResumeWorker", admin_pb2.ResumeWorkerRequest(worker_id=worker_id), admin_pb2.ResumeWorkerResponse
    )


def flush_cache(worker_id: str | None) -> Call[admin_pb2.FlushCacheResponse]:
    return _admin(
        "FlushCache", admin_pb2.FlushCacheRequest(worker_id=worker_id), admin_pb2.FlushCacheResponse
    )


def rebuild_index(worker_id: str | None) -> Call[admin_pb2.RebuildIndexResponse]:
    request = admin_pb2.RebuildIndexRequest(worker_id=worker_id)
    return _admin("RebuildIndex", request, admin_pb2.RebuildIndexResponse)


def pull_prefix(
    worker_id: str, prompt: str | None, source_id: str | None, arguments: PromptArguments
) -> Call[admin_pb2.PullPrefixResponse]:
    request = pull_request(worker_id, prompt, source_id, arguments)
    return _admin("PullPrefix", request, admin_pb2.PullPrefixResponse)


def add_adapter(name: str, path: str, tenant: str, model: str | None) -> Call[admin_pb2.AddAdapterResponse]:
    request = admin_pb2.AddAdapterRequest(name=name, path=path, tenant=tenant, model=model)
    return _admin("AddAdapter", request, admin_pb2.AddAdapterResponse)


def remove_adapter(name: str, model: str | None) -> Call[admin_pb2.RemoveAdapterResponse]:
    request = admin_pb2.RemoveAdapterRequest(name=name, model=model)
    return _admin("RemoveAdapter", request, admin_pb2.RemoveAdapterResponse)


def list_adapters(model: str | None) -> Call[admin_pb2.ListAdaptersResponse]:
    request = admin_pb2.ListAdaptersRequest(model=model)
    return _admin("ListAdapters", request, admin_pb2.ListAdaptersResponse)


def abort_any(request_id: str) -> Call[inference_pb2.AbortResponse]:
    request = message_of(inference_pb2.AbortRequest, "request_id", request_id)
    return _admin("Abort", request, inference_pb2.AbortResponse)


def _inference(name: str, request: Message, response_type: type[Response]) -> Call[Response]:
    path = f"/blockyard.v1.InferenceService/{name}"
    return Call(path=path, request=request, response_type=response_type)


def _cluster(name: str, request: Message, response_type: type[Response]) -> Call[Response]:
    path = f"/blockyard.v1.ClusterService/{name}"
    return Call(path=path, request=request, response_type=response_type)


def _admin(name: str, request: Message, response_type: type[Response]) -> Call[Response]:
    path = f"/blockyard.v1.AdminService/{name}"
    return Call(path=path, request=request, response_type=response_type)
