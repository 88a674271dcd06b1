"""AdminService: changes a running cluster by passing calls on to the workers.

Owns the bounds of fields, the deadline of each call and the audit line. Does not own permissions (interceptor.py) or
what a drain or a flush does (the workers). Every router is connected to all workers, so any router can serve any call.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from blockyard.proto.naming.identifiers import NAME_RULE, is_id, is_name
from blockyard.proto.runtime.grace import GRACE_RULE, MAX_GRACE_SECONDS, grace_seconds_of
from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from blockyard.router.adapters.keeper import READ_SECONDS
from blockyard.router.admission.auth import principal_name
from blockyard.router.calls.bounds import CallBounds
from blockyard.router.cluster.link import EngineLink
from blockyard.router.errors import (
    DeadlinePassed,
    InvalidRequest,
    LastWorker,
    NameTaken,
    NotFound,
    RequestAborted,
    RouterError,
    WorkerUnreachable,
)
from blockyard.router.model_group import ModelGroup
from blockyard.router.model_groups import ModelGroups
from blockyard.router.services.interceptor import Context
from blockyard.router.services.messages import adapter_message
from blockyard.router.services.named_prompts import named
from blockyard.router.services.ordered_pulls import MAX_PULL_SECONDS, chosen_pull, ordered_pull

logger = logging.getLogger("blockyard.audit")

ANSWER_SECONDS = 10.0
"""Deadline of calls without a grace period. A worker serves them between two steps."""
HAND_OVER_SECONDS = 60.0
"""Time beyond the grace period if the client sets no deadline, for the current step to end."""
DRAIN_KNOWN_SECONDS = 0.5
"""Time after which all routers know of a drain. A worker tells all of them at once, and again with each pong."""
LOOK_SECONDS = 0.02
MAX_PATH_CHARS = 1024
PULL_SHARE = 0.9
"""Share of a call's time that its pull may take. The rest is for the answer."""
T = TypeVar("T")
AboutAdapters = admin_pb2.AddAdapterRequest | admin_pb2.RemoveAdapterRequest | admin_pb2.ListAdaptersRequest


def leaves_a_worker(worker_id: str, ready: Iterable[str], asked: Collection[str]) -> bool:
    """Return True if a worker other than `worker_id` takes requests and will go on to do so.

    `asked` are workers with a drain requested on this router, which they may not have announced yet.
    """
    return any(other != worker_id and other not in asked for other in ready)


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """AdminService of one router. `principal` returns the name of the current caller, for the audit log."""

    def __init__(
        self, groups: ModelGroups, bounds: CallBounds, *, principal: Callable[[], str] = principal_name
    ) -> None:
        self._groups = groups
        self._bounds = bounds
        self._principal = principal
        self._asked: Counter[str] = Counter()
        """Number of drains requested here, by worker, until all routers know of them."""

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: Context
    ) -> admin_pb2.DrainWorkerResponse:
        grace_seconds = _grace_seconds(request)
        link = self._link(request.worker_id)
        is_checked = not (request.force or self._is_draining(request.worker_id))
        if is_checked:
            self._refuse_last(request.worker_id)
        forced = " force" if request.force else ""
        self._audit("DrainWorker", f"{request.worker_id} grace_seconds={grace_seconds:g}{forced}")
        left_seconds = context.time_remaining()
        timeout_seconds = grace_seconds + HAND_OVER_SECONDS
        if left_seconds is not None:
            timeout_seconds = min(left_seconds, MAX_GRACE_SECONDS + HAND_OVER_SECONDS)
        asked = admin_pb2.DrainWorkerRequest(worker_id=request.worker_id, grace_seconds=grace_seconds)
        drain: Coroutine[Any, Any, admin_pb2.DrainWorkerResponse] = _answer(
            link.call("DrainWorker", asked, timeout_seconds)
        )
        return await (self._checked_again(request.worker_id, link, drain) if is_checked else drain)

    async def ResumeWorker(
        self, request: admin_pb2.ResumeWorkerRequest, context: Context
    ) -> admin_pb2.ResumeWorkerResponse:
        link = self._link(request.worker_id)
        self._audit("ResumeWorker", request.worker_id)
        resumed: admin_pb2.ResumeWorkerResponse = await _answer(
            link.call("ResumeWorker", request, _seconds_left(context))
        )
        # Otherwise a drain of another worker, sent at once, would still count this one as drained.
        end = time.monotonic() + _seconds_left(context) / 2
        while self._is_draining(request.worker_id) and link.is_up and time.monotonic() < end:  # noqa: ASYNC110 - no event
            await asyncio.sleep(LOOK_SECONDS)
        return resumed

    async def FlushCache(
        self, request: admin_pb2.FlushCacheRequest, context: Context
    ) -> admin_pb2.FlushCacheResponse:
        answers = await self._ask_each("FlushCache", request, context)
        return admin_pb2.FlushCacheResponse(
            flushed_blocks=sum(answer.flushed_blocks for answer in answers),
            flushed_host_blocks=sum(answer.flushed_host_blocks for answer in answers),
        )

    async def RebuildIndex(
        self, request: admin_pb2.RebuildIndexRequest, context: Context
    ) -> admin_pb2.RebuildIndexResponse:
        answers = await self._ask_each("RebuildIndex", request, context)
        return admin_pb2.RebuildIndexResponse(workers=sum(answer.workers for answer in answers))

    async def PullPrefix(
        self, request: admin_pb2.PullPrefixRequest, context: Context
    ) -> admin_pb2.PullPrefixResponse:
        link, tenant = self._link(request.worker_id), self._bounds.caller(context).tenant
        if request.HasField("source_id"):
            self._link(request.source_id, "source_id")
        self._audit("PullPrefix", f"{request.worker_id} from {request.source_id or 'any'}")
        found = self._groups.find_worker(request.worker_id)
        assert found is not None, "its link was found"
        parts = found[0].parts
        with found[0].in_use():
            async with named(parts, self._bounds, request, context) as (prompt_tokens, names):
                wanted = await chosen_pull(parts, request, prompt_tokens, names)
                account = "" if request.public_prefix else tenant
                seconds = min(PULL_SHARE * self._bounds.seconds_left(context), MAX_PULL_SECONDS)
                return await ordered_pull(parts, wanted, names, link, tenant=account, seconds=seconds)

    async def AddAdapter(
        self, request: admin_pb2.AddAdapterRequest, context: Context
    ) -> admin_pb2.AddAdapterResponse:
        if not is_id(request.name):
            raise InvalidRequest.of("name", f"must be {NAME_RULE}, not empty")
        if not is_name(request.tenant):
            raise InvalidRequest.of("tenant", f"must be {NAME_RULE}")
        if not request.path or len(request.path) > MAX_PATH_CHARS:
            raise InvalidRequest.of("path", f"must have 1 to {MAX_PATH_CHARS} characters")
        group = self._named_group(request)
        adapters = group.parts.adapters
        await self._groups.check_adapter_name(request.name, group)
        self._audit("AddAdapter", f"{request.name} model={group.model.id} tenant={request.tenant}")
        left_seconds = context.time_remaining()
        timeout_seconds = READ_SECONDS if left_seconds is None else left_seconds
        with group.in_use():
            is_new = adapters.registry.find(request.name) is None
            adapter = await adapters.add(request.name, request.path, request.tenant, timeout_seconds)
            if is_new:
                await self._checked_name(request.name, group)
        return admin_pb2.AddAdapterResponse(adapter=adapter_message(adapter, group.model.id))

    async def _checked_name(self, name: str, group: ModelGroup) -> None:
        """Remove an adapter that was added if another model got one of this name meanwhile. Raises NameTaken then.

        Each call writes first and checks later, so at least one of two that are simultaneous sees the other's.
        """
        try:
            await self._groups.check_adapter_name(name, group)
        except NameTaken:
            with suppress(NotFound):
                await group.parts.adapters.remove(name)
            raise

    async def RemoveAdapter(
        self, request: admin_pb2.RemoveAdapterRequest, context: Context
    ) -> admin_pb2.RemoveAdapterResponse:
        if not is_id(request.name):
            raise InvalidRequest.of("name", f"must be {NAME_RULE}, not empty")
        group = self._named_group(request)
        self._audit("RemoveAdapter", f"{request.name} model={group.model.id}")
        with group.in_use():
            await group.parts.adapters.remove(request.name)
        return admin_pb2.RemoveAdapterResponse()

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: Context
    ) -> admin_pb2.ListAdaptersResponse:
        group = self._named_group(request)
        await group.parts.adapters.refresh()
        adapters = group.parts.adapters.registry.listed()
        return admin_pb2.ListAdaptersResponse(
            adapters=[adapter_message(adapter, group.model.id) for adapter in adapters]
        )

    def _named_group(self, request: AboutAdapters) -> ModelGroup:
        """Return the group of the model that a call about adapters names. Raises UnknownModel."""
        return self._groups.named(request.model if request.HasField("model") else None)

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        if not is_id(request.request_id):
            raise InvalidRequest.of("request_id", f"must be {NAME_RULE}")
        self._audit("Abort", request.request_id)
        self._groups.registry.abort(request.request_id)
        return inference_pb2.AbortResponse()

    async def _ask_each(
        self,
        method: str,
        request: admin_pb2.FlushCacheRequest | admin_pb2.RebuildIndexRequest,
        context: Context,
    ) -> list[Any]:
        """Pass a call on to the named worker, or to all connected ones at once, and return the answers.

        Raises WorkerUnreachable if any of several failed, after all have been asked.
        """
        if request.HasField("worker_id"):
            links = [self._link(request.worker_id)]
        else:
            fleets = (group.parts.fleet for group in self._groups)
            links = [link for fleet in fleets for link in fleet.links.values() if link.is_up]
        self._audit(method, request.worker_id or f"all {len(links)} workers")
        timeout_seconds = _seconds_left(context)
        answers = await asyncio.gather(
            *(_answer(link.call(method, request, timeout_seconds)) for link in links),
            return_exceptions=True,
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(links) > 1 and failures:
            raise WorkerUnreachable(f"{len(failures)} of {len(links)} workers did not answer")
        if failures:
            raise failures[0]
        return answers

    def _link(self, worker_id: str, field: str = "worker_id") -> EngineLink:
        if not is_id(worker_id):
            raise InvalidRequest.of(field, f"must be {NAME_RULE}")
        return self._groups.link(worker_id, field)

    async def _checked_again(
        self, worker_id: str, link: EngineLink, drain: Coroutine[Any, Any, admin_pb2.DrainWorkerResponse]
    ) -> admin_pb2.DrainWorkerResponse:
        """Run the drain, but undo it if it leaves no worker because of a simultaneous drain through another router.

        Each router marks its drain first and checks later, so at least one of them sees the other's mark.
        """
        self._asked[worker_id] += 1
        async with BackgroundTasks(on_failure=None) as tasks:
            draining = tasks.start(drain, name="drain")
            try:
                while not (draining.done() or self._is_draining(worker_id)):
                    await asyncio.wait({draining}, timeout=LOOK_SECONDS)
                if draining.done():
                    draining.result()
                await asyncio.sleep(DRAIN_KNOWN_SECONDS)
            finally:
                self._asked -= Counter((worker_id,))
            try:
                self._refuse_last(worker_id)
            except LastWorker:
                resumed = admin_pb2.ResumeWorkerRequest(worker_id=worker_id)
                await _answer(link.call("ResumeWorker", resumed, ANSWER_SECONDS))
                raise
            return await draining

    def _is_draining(self, worker_id: str) -> bool:
        found = self._groups.find_worker(worker_id)
        return found is not None and found[1].is_draining

    def _refuse_last(self, worker_id: str) -> None:
        found = self._groups.find_worker(worker_id)
        ready = [] if found is None else [worker.worker_id for worker in found[0].parts.fleet.view.ready()]
        if not leaves_a_worker(worker_id, ready, self._asked):
            raise LastWorker(
                "no other worker takes requests: bring one up first, or drain this one with `force` (--force)"
            )

    def _audit(self, method: str, about: str) -> None:
        """Write the audit line of a call. `about` holds only checked names, so it cannot break the line."""
        logger.info("%s %s by %s", method, about, self._principal())


def _grace_seconds(request: admin_pb2.DrainWorkerRequest) -> float:
    grace_seconds = grace_seconds_of(request)
    if grace_seconds is None:
        raise InvalidRequest.of("grace_seconds", GRACE_RULE)
    return grace_seconds


def _seconds_left(context: Context) -> float:
    left_seconds = context.time_remaining()
    return ANSWER_SECONDS if left_seconds is None else min(left_seconds, ANSWER_SECONDS)


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except ConnectionError:
        raise WorkerUnreachable("the worker is not connected") from None
    except grpc.aio.AioRpcError as error:
        raise _as_answer(error.code()) from None


def _as_answer(code: grpc.StatusCode) -> RouterError:
    match code:
        case grpc.StatusCode.ABORTED:
            return RequestAborted("the drain was undone")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlinePassed("the worker did not answer in time; it may still complete the call")
        case grpc.StatusCode.UNIMPLEMENTED:
            return WorkerUnreachable("the worker is too old for this call")
    return WorkerUnreachable(f"the worker did not answer: {code.name}")
