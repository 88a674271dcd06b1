"""Ordered pulls: an admin has a worker fetch a prompt's blocks from another one, although no request needs them.

Owns the choice of the source where the admin names none, and the words for what went wrong. The pull is counted and
shown like any other (generation/pulls.py). Does not own the transfer (the workers) or the price of a pull for a request
(placement/pulls.py).
"""

import secrets
from typing import NamedTuple

import grpc
from blockyard.proto.naming.block_kind import BlockKind, difference
from blockyard.proto.v1 import admin_pb2, session_pb2
from blockyard.proto.v1.session_pb2 import PullEnd, PullRefusal
from blockyard.router.cluster.link import EngineLink
from blockyard.router.cluster.worker_view import WorkerView, exchange
from blockyard.router.errors import (
    DeadlinePassed,
    InvalidRequest,
    PullFailed,
    PullImpossible,
    RouterError,
    UnknownWorker,
    WorkerUnreachable,
)
from blockyard.router.generation.generation import RouterParts
from blockyard.router.generation.relay import tenant_key
from blockyard.router.placement.pulls import PullPlan, PullSource

MAX_PULL_SECONDS = 60.0
"""Longest pull. The source keeps the blocks no longer either."""
ANSWER_SECONDS = 2.0
"""Time beyond the pull's for the worker to report it."""


class WantedPull(NamedTuple):
    """A pull that an admin has ordered."""

    worker: WorkerView
    plan: PullPlan


async def chosen_pull(
    parts: RouterParts, request: admin_pb2.PullPrefixRequest, prompt_tokens: int, names: list[bytes]
) -> WantedPull:
    """Return the pull of a prompt with these block names, from the named source or the one that has most of them.

    Raises InvalidRequest, UnknownWorker or PullImpossible.
    """
    if not names:
        raise PullImpossible("the prompt fills no block")
    if request.source_id == request.worker_id:
        raise InvalidRequest.of("source_id", "must be another worker than worker_id")
    view = parts.fleet.view
    worker = view.find(request.worker_id)
    if worker is None or worker.hello is None:
        raise UnknownWorker.of("worker_id", "no worker of this id is known")
    if request.HasField("source_id"):
        named = view.find(request.source_id)
        # The index may know fewer blocks than the source has, which says itself how many these are.
        source = None if named is None else view.pull_source(named, len(names), prompt_tokens)
        if named is not None and named.hello is not None and not exchange(worker, named):
            raise PullImpossible(f"the source's blocks are of another kind: {_difference(named, worker)}")
        if source is None:
            raise PullImpossible("the source lends no blocks, or is not connected")
        num_blocks = len(names)
    else:
        source, num_blocks = await _deepest(parts, worker, prompt_tokens, names)
    plan = PullPlan(
        source=source,
        num_blocks=num_blocks,
        num_bytes=num_blocks * worker.hello.block_bytes,
        time_ms=view.pull_ms(worker, num_blocks * worker.hello.block_size, source),
        saved_ms=0.0,
    )
    return WantedPull(worker, plan)


def _difference(first: WorkerView, second: WorkerView) -> str:
    kinds = [str(BlockKind.of(worker.hello or session_pb2.Hello())) for worker in (first, second)]
    return difference(*kinds)


async def _deepest(
    parts: RouterParts, worker: WorkerView, prompt_tokens: int, names: list[bytes]
) -> tuple[PullSource, int]:
    found = await parts.placer.look_up(names)
    if not found.available:
        raise PullImpossible("there is no prefix index, or it does not answer: name a source")
    depths = sorted(
        found.depth_by_worker.items(), key=lambda item: (-item[1].blocks - item[1].host_blocks, item[0])
    )
    unlike: WorkerView | None = None
    for source_id, depth in depths:
        other = parts.fleet.view.find(source_id) if source_id != worker.worker_id else None
        num_blocks = depth.blocks + depth.host_blocks
        if other is None or not num_blocks:
            continue
        if not exchange(worker, other):
            unlike = unlike or other
            continue
        source = parts.fleet.view.pull_source(other, num_blocks, prompt_tokens)
        if source is not None:
            return source, num_blocks
    if unlike is not None:
        raise PullImpossible(
            f"the blocks of worker {unlike.worker_id} are of another kind: {_difference(unlike, worker)}"
        )
    raise PullImpossible("no other worker has a block of the prompt that it may lend")


async def ordered_pull(
    parts: RouterParts,
    wanted: WantedPull,
    names: list[bytes],
    link: EngineLink,
    *,
    tenant: str,
    seconds: float,
) -> admin_pb2.PullPrefixResponse:
    """Have the worker run the pull, and return what it brought.

    `link` is the worker's. Raises PullImpossible, PullFailed, DeadlinePassed or WorkerUnreachable.
    """
    plan, pulls = wanted.plan, parts.relay.pulls
    request = session_pb2.PullBlocksRequest(
        block_names=b"".join(names[: plan.num_blocks]),
        pull=session_pb2.Pull(
            address=plan.source.transfer_address, incarnation=plan.source.incarnation, seconds=seconds
        ),
        tenant=tenant_key(tenant),
    )
    shown = pulls.begin(f"pull-{secrets.token_hex(4)}", wanted.worker.worker_id, plan)
    report: session_pb2.PullReport | None = None
    try:
        answer: session_pb2.PullBlocksResponse = await link.call(
            "PullBlocks", request, seconds + ANSWER_SECONDS
        )
        report = answer.report
    except ConnectionError:
        raise WorkerUnreachable("the worker is not connected") from None
    except grpc.aio.AioRpcError as error:
        raise _refused(error.code()) from None
    finally:
        pulls.end(shown, report)
    if report.end not in (PullEnd.PULL_END_WHOLE, PullEnd.PULL_END_FEWER):
        raise _broken(report)
    if not answer.blocks_before + report.num_blocks:
        raise PullImpossible("the source has no block of the prompt")
    return admin_pb2.PullPrefixResponse(
        source_id=plan.source.worker_id,
        prompt_blocks=len(names),
        blocks_before=answer.blocks_before,
        num_blocks=report.num_blocks,
        num_bytes=report.num_bytes,
        elapsed_ms=1000 * (report.setup_seconds + report.transfer_seconds),
    )


def _refused(code: grpc.StatusCode) -> RouterError:
    match code:
        case grpc.StatusCode.FAILED_PRECONDITION:
            return PullImpossible("the worker has no host memory for blocks (--host-cache-gib)")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return PullFailed("the worker runs too many pulls, or its host memory is in use: try again")
        case grpc.StatusCode.ABORTED:
            return PullFailed("the worker fetches these blocks already: try again")
        case grpc.StatusCode.UNIMPLEMENTED:
            return PullImpossible("the worker is too old for this call")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlinePassed("the worker did not answer in time; the pull may still go on")
    return WorkerUnreachable(f"the worker did not answer: {code.name}")


def _broken(report: session_pb2.PullReport) -> RouterError:
    arrived = f"{report.num_blocks} blocks have arrived and are kept"
    match report.end, report.refusal:
        case PullEnd.PULL_END_REFUSED, PullRefusal.PULL_REFUSAL_LAYOUT:
            return PullImpossible(
                "the source refuses: its blocks have another model, data type, size or layout"
            )
        case PullEnd.PULL_END_REFUSED, PullRefusal.PULL_REFUSAL_INCARNATION:
            return PullFailed("the source was restarted: it has nothing of what it had")
        case PullEnd.PULL_END_REFUSED, _:
            return PullFailed("the source is busy with other pulls: try again")
        case PullEnd.PULL_END_UNREACHABLE, _:
            return PullFailed("the worker cannot reach the source")
        case PullEnd.PULL_END_LATE, _:
            return DeadlinePassed(f"the pull took too long: {arrived}")
        case PullEnd.PULL_END_AVOIDED, _:
            return PullFailed(
                "the worker avoids the source because of an earlier pull: try again in a minute"
            )
        case PullEnd.PULL_END_CORRUPT, _:
            return PullFailed(f"the source sent a wrong block: {arrived}")
    return PullFailed(f"the connection to the source was cut: {arrived}")
