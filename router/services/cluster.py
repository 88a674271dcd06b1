"""ClusterService: read-only views of this router's state, and questions passed on to workers.

Questions about pools go to the worker itself, with the cluster secret and a deadline. Page tokens are the worker's own
and opaque here.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from blockyard.proto.limits import MAX_PAGE_SIZE
from blockyard.proto.naming.block_hash import NAME_BYTES
from blockyard.proto.v1 import cluster_pb2, cluster_pb2_grpc
from blockyard.router.calls.bounds import CallBounds
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import EngineLink
from blockyard.router.dispatch.index_report import current_condition, index_info, joined
from blockyard.router.errors import InvalidRequest, Overloaded, RouterError, WorkerUnreachable
from blockyard.router.generation.generation import scoped_session
from blockyard.router.generation.pulls import recent_of
from blockyard.router.model_groups import ModelGroups
from blockyard.router.request.adapter_names import named_adapter
from blockyard.router.services.inference import model_message
from blockyard.router.services.interceptor import Context, write
from blockyard.router.services.messages import (
    candidate_message,
    latencies_message,
    pull_message,
    request_message,
    split_message,
    timeless,
    workers_message,
)
from blockyard.router.services.named_prompts import named

WATCH_SECONDS = 0.25
"""Least time between two messages of WatchWorkers."""
MAX_WATCHES = 64
"""Most watches at once on one router."""
MAX_WATCHES_OF_A_CLIENT = 32
WATCH_RETRY_SECONDS = 5.0
T = TypeVar("T")


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """ClusterService of one router."""

    def __init__(
        self, groups: ModelGroups, bounds: CallBounds, *, cluster: str, version: str, policy: str
    ) -> None:
        self._groups = groups
        self._bounds = bounds
        self._cluster = cluster
        self._version = version
        self._policy = policy
        self._watches: Counter[str] = Counter()

    async def GetClusterInfo(
        self, request: cluster_pb2.GetClusterInfoRequest, context: Context
    ) -> cluster_pb2.ClusterInfo:
        parts = [group.parts for group in self._groups]
        registry = self._groups.registry
        num_requests, num_waiting = len(registry.records()), registry.num_waiting()
        async with self._bounds.deadline(context):
            condition = joined(
                [await current_condition(one.placer.prefix_lookup, one.fleet.view) for one in parts],
                title=lambda number: parts[number].facts.name,
            )
        relays = [one.relay for one in parts]
        recent, now = recent_of(relay.pulls for relay in relays), relays[0].pulls.now()
        return cluster_pb2.ClusterInfo(
            cluster=self._cluster,
            version=self._version,
            model=model_message(parts[0]),
            models=map(model_message, parts),
            policy=self._policy,
            index_available=condition.is_available,
            index_state=condition.state,
            migrations=sum(relay.num_migrations for relay in relays),
            splits=sum(relay.num_splits for relay in relays),
            requests_lost=sum(relay.num_lost for relay in relays),
            requests_quarantined=sum(relay.num_quarantined for relay in relays),
            workers_ready=self._groups.num_ready_workers,
            workers_known=sum(len(one.fleet.view.workers()) for one in parts),
            requests_running=num_requests - num_waiting,
            requests_waiting=num_waiting,
            first_token=latencies_message([one.metrics.first_token for one in parts]),
            inter_token=latencies_message([one.metrics.gaps for one in parts]),
            pulls=[pull_message(pull, now) for pull in recent],
        )

    async def GetIndexInfo(
        self, request: cluster_pb2.GetIndexInfoRequest, context: Context
    ) -> cluster_pb2.IndexInfo:
        self._groups.check(request, self._bounds.caller(context).tenant)
        with self._groups.in_use(request) as parts:
            async with self._bounds.deadline(context):
                return await index_info(parts.placer.prefix_lookup, parts.fleet)

    async def ListWorkers(
        self, request: cluster_pb2.ListWorkersRequest, context: Context
    ) -> cluster_pb2.ListWorkersResponse:
        return workers_message(self._fleets)

    async def WatchWorkers(self, request: cluster_pb2.WatchWorkersRequest, context: Context) -> None:
        with self._watching(self._bounds.caller(context).client):
            await self._watch_workers(context)

    @contextmanager
    def _watching(self, client: str) -> Iterator[None]:
        """Count a watch of a client for the life of the context. Raises Overloaded beyond the limits."""
        for is_full, limit in (
            (
                self._watches[client] >= MAX_WATCHES_OF_A_CLIENT,
                f"{MAX_WATCHES_OF_A_CLIENT} watches of this client",
            ),
            (self._watches.total() >= MAX_WATCHES, f"{MAX_WATCHES} watches"),
        ):
            if is_full:
                raise Overloaded(f"{limit} run already", retry_after_seconds=WATCH_RETRY_SECONDS)
        self._watches[client] += 1
        try:
            yield
        finally:
            self._watches[client] -= 1
            if not self._watches[client]:
                del self._watches[client]

    async def _watch_workers(self, context: Context) -> None:
        sent: cluster_pb2.ListWorkersResponse | None = None
        while not self._groups.registry.is_draining:
            # Silence changes states without an event, so the watch polls.
            now = workers_message(self._fleets)
            if sent is None or timeless(now) != timeless(sent):
                await write(context, now)
                sent = now
            await asyncio.sleep(WATCH_SECONDS)

    async def GetBlockPool(
        self, request: cluster_pb2.GetBlockPoolRequest, context: Context
    ) -> cluster_pb2.BlockPool:
        link = self._link(request.worker_id)
        return await _ask(lambda: link.block_pool(request))

    async def ListBlocks(
        self, request: cluster_pb2.ListBlocksRequest, context: Context
    ) -> cluster_pb2.ListBlocksResponse:
        if request.page_size > MAX_PAGE_SIZE:
            raise InvalidRequest.of("page_size", f"must be at most {MAX_PAGE_SIZE}")
        link = self._link(request.worker_id)
        return await _ask(lambda: link.list_blocks(request))

    async def FindBlocks(
        self, request: cluster_pb2.FindBlocksRequest, context: Context
    ) -> cluster_pb2.FindBlocksResponse:
        for field, asked in (("block_ids", request.block_ids), ("names", request.names)):
            if len(asked) > MAX_PAGE_SIZE:
                raise InvalidRequest.of(field, f"must be at most {MAX_PAGE_SIZE}")
        if any(len(name) != NAME_BYTES for name in request.names):
            raise InvalidRequest.of("names", f"must have {NAME_BYTES} bytes each")
        link = self._link(request.worker_id)
        return await _ask(lambda: link.find_blocks(request))

    async def ListSequences(
        self, request: cluster_pb2.ListSequencesRequest, context: Context
    ) -> cluster_pb2.ListSequencesResponse:
        if request.page_size > MAX_PAGE_SIZE:
            raise InvalidRequest.of("page_size", f"must be at most {MAX_PAGE_SIZE}")
        link = self._link(request.worker_id)
        return await _ask(lambda: link.list_sequences(request))

    async def LookupPrefix(
        self, request: cluster_pb2.LookupPrefixRequest, context: Context
    ) -> cluster_pb2.LookupPrefixResponse:
        self._groups.check(request, self._bounds.caller(context).tenant)
        with self._groups.in_use(request) as parts:
            async with named(parts, self._bounds, request, context) as (prompt_tokens, names):
                found = await parts.placer.look_up(names)
        holders = sorted(
            found.depth_by_worker.items(), key=lambda item: (-item[1].blocks, -item[1].host_blocks, item[0])
        )
        return cluster_pb2.LookupPrefixResponse(
            prompt_tokens=prompt_tokens,
            prompt_blocks=len(names),
            holders=[
                cluster_pb2.PrefixHolder(
                    worker_id=worker_id, cached_blocks=depth.blocks, host_cached_blocks=depth.host_blocks
                )
                for worker_id, depth in holders
            ],
            index_available=found.available,
            block_names=names,
        )

    async def ExplainPlacement(
        self, request: cluster_pb2.ExplainPlacementRequest, context: Context
    ) -> cluster_pb2.ExplainPlacementResponse:
        caller = self._bounds.caller(context)
        self._groups.check(request, caller.tenant)
        with self._groups.in_use(request) as parts:
            async with named(parts, self._bounds, request, context) as (prompt_tokens, names):
                adapter = named_adapter(request, parts.adapters.registry, parts.facts, caller.tenant)
                placement, index_available = await parts.placer.explain(
                    names,
                    prompt_tokens,
                    session_id=scoped_session(request.session_id, caller.realm),
                    adapter=None if adapter is None else adapter.to_place,
                )
            options = parts.placer.pull_options(placement, prompt_tokens) if placement else {}
        return cluster_pb2.ExplainPlacementResponse(
            policy=self._policy,
            chosen_worker_id=placement.chosen.worker_id if placement else "",
            candidates=[candidate_message(score, options[score.address]) for score in placement.scores]
            if placement
            else [],
            index_available=index_available,
            split=split_message(placement.split) if placement and placement.split else None,
        )

    async def ListRequests(
        self, request: cluster_pb2.ListRequestsRequest, context: Context
    ) -> cluster_pb2.ListRequestsResponse:
        now = self._groups.default.parts.clock()
        return cluster_pb2.ListRequestsResponse(
            requests=[request_message(record, now) for record in self._groups.registry.records()]
        )

    def _link(self, worker_id: str) -> EngineLink:
        if not worker_id:
            raise InvalidRequest.of("worker_id", "is required")
        return self._groups.link(worker_id)

    @property
    def _fleets(self) -> dict[str, Fleet]:
        return {group.model.id: group.parts.fleet for group in self._groups}


async def _ask(question: Callable[[], Awaitable[T]]) -> T:
    """Return a worker's answer. Raises InvalidRequest if the worker refuses the page token, else WorkerUnreachable."""
    try:
        return await question()
    except ConnectionError:
        raise WorkerUnreachable("the worker is not connected") from None
    except grpc.aio.AioRpcError as error:
        raise _as_answer(error.code()) from None


def _as_answer(code: grpc.StatusCode) -> RouterError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest.of("page_token", "is not one that this worker gave for this list")
    return WorkerUnreachable(f"the worker did not answer: {code.name}")
