"""Messages about a router's state: workers, candidates of a placement, and requests.

Pure. Does not own the calls that return them (cluster.py).
"""

from collections.abc import Iterable, Mapping, Sequence

from blockyard.proto.metrics.readings import Histogram
from blockyard.proto.v1 import admin_pb2, cluster_pb2
from blockyard.router.adapters.registry import RegisteredAdapter
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.worker_view import WorkerState, WorkerView
from blockyard.router.generation.pulls import Pull
from blockyard.router.generation.registry import RequestRecord, RequestState
from blockyard.router.placement.pulls import PullOption, PullVerdict
from blockyard.router.placement.scoring import Score
from blockyard.router.placement.splits import Split

WORKER_STATES = {
    WorkerState.CONNECTING: cluster_pb2.WORKER_STATE_CONNECTING,
    WorkerState.READY: cluster_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: cluster_pb2.WORKER_STATE_DRAINING,
    WorkerState.SUSPECT: cluster_pb2.WORKER_STATE_SUSPECT,
    WorkerState.REFUSED: cluster_pb2.WORKER_STATE_REFUSED,
    WorkerState.LOST: cluster_pb2.WORKER_STATE_LOST,
}
REQUEST_STATES = {
    RequestState.QUEUED: cluster_pb2.REQUEST_STATE_QUEUED,
    RequestState.PLACED: cluster_pb2.REQUEST_STATE_PLACED,
    RequestState.STREAMING: cluster_pb2.REQUEST_STATE_STREAMING,
}

PULL_VERDICTS = {
    PullVerdict.CHOSEN: cluster_pb2.PULL_VERDICT_CHOSEN,
    PullVerdict.TIE: cluster_pb2.PULL_VERDICT_TIE,
    PullVerdict.OTHER_SOURCE: cluster_pb2.PULL_VERDICT_OTHER_SOURCE,
    PullVerdict.UNMEASURED: cluster_pb2.PULL_VERDICT_UNMEASURED,
    PullVerdict.MEMORY: cluster_pb2.PULL_VERDICT_MEMORY,
}


def workers_message(fleets: Mapping[str, Fleet]) -> cluster_pb2.ListWorkersResponse:
    """Return the workers of all models. `fleets` are by the model's id."""
    workers = [
        _worker_message(model, fleet, worker)
        for model, fleet in fleets.items()
        for worker in fleet.view.workers()
    ]
    workers.sort(key=lambda worker: (worker.worker_id, worker.address))
    return cluster_pb2.ListWorkersResponse(workers=workers)


def _worker_message(model: str, fleet: Fleet, worker: WorkerView) -> cluster_pb2.Worker:
    state = fleet.view.state(worker)
    reason = worker.reason
    if state is WorkerState.SUSPECT or (state is WorkerState.LOST and not reason):
        reason = "silent"
    message = cluster_pb2.Worker(
        address=worker.address,
        state=WORKER_STATES[state],
        state_reason="" if state is WorkerState.READY else reason,
        load=worker.load,
        index=worker.index,
        model=model,
    )
    if worker.hello is not None:
        message.worker_id = worker.worker_id
        message.incarnation = worker.incarnation
        message.total_blocks = worker.hello.total_blocks
        message.block_size = worker.hello.block_size
        message.device = worker.hello.device
        message.num_ranks = worker.hello.num_ranks
        message.engine = worker.hello.engine
        message.role = worker.role
        message.max_loras = worker.hello.max_loras
        message.kv_layout = worker.hello.kv_layout
        message.seconds_since_heard = fleet.view.silence_seconds(worker)
    return message


def timeless(message: cluster_pb2.ListWorkersResponse) -> list[cluster_pb2.Worker]:
    """Return copies of the workers without the fields that change with time alone."""
    workers = []
    for worker in message.workers:
        copy = cluster_pb2.Worker()
        copy.CopyFrom(worker)
        copy.seconds_since_heard = 0
        if copy.HasField("index"):
            copy.index.lag_seconds = 0
        workers.append(copy)
    return workers


def candidate_message(score: Score, options: Iterable[PullOption] = ()) -> cluster_pb2.PlacementCandidate:
    return cluster_pb2.PlacementCandidate(
        worker_id=score.worker_id,
        cached_tokens=score.cached_tokens,
        host_cached_tokens=score.host_cached_tokens,
        uncached_tokens=score.uncached_tokens,
        queue_ms=score.queue_ms,
        prefill_ms=score.prefill_ms,
        host_load_ms=score.host_load_ms,
        decode_ms=score.decode_ms,
        memory_ms=score.memory_ms,
        interference_ms=score.interference_ms,
        adapter_ms=score.adapter_ms,
        pulled_tokens=score.pulled_tokens,
        pull_ms=score.pull_ms,
        pulled_from=score.pull.source.worker_id if score.pull is not None else "",
        total_ms=score.total_ms,
        cost=score.cost,
        pull_options=[
            cluster_pb2.PullOption(
                source_id=option.source.worker_id,
                verdict=PULL_VERDICTS[option.verdict],
                pulled_tokens=option.pulled_tokens,
                time_ms=option.time_ms,
                saved_ms=option.saved_ms,
            )
            for option in options
        ],
    )


def split_message(split: Split) -> cluster_pb2.SplitPlacement:
    return cluster_pb2.SplitPlacement(
        is_chosen=split.is_chosen,
        prefill=candidate_message(split.prefill),
        decode=candidate_message(split.decode),
        split_ms=split.split_ms,
        local_ms=split.local_ms or 0.0,
    )


def request_message(record: RequestRecord, now: float) -> cluster_pb2.RequestInfo:
    return cluster_pb2.RequestInfo(
        request_id=record.request_id,
        state=REQUEST_STATES[record.state],
        worker_id=record.progress.worker_id,
        prompt_tokens=record.prompt_tokens,
        generated_tokens=record.progress.num_generated,
        age_seconds=now - record.arrival,
        tenant=record.tenant,
        cached_tokens=record.progress.cached_tokens,
        pulled_blocks=0 if record.progress.pull is None else record.progress.pull.num_blocks,
        model=record.model,
        pulled_from="" if record.progress.pull is None else record.progress.pull.plan.source.worker_id,
    )


def pull_message(pull: Pull, now: float) -> cluster_pb2.RecentPull:
    return cluster_pb2.RecentPull(
        number=pull.number,
        worker_id=pull.worker_id,
        source_id=pull.plan.source.worker_id,
        end=pull.end,
        planned_bytes=pull.plan.num_bytes,
        planned_ms=pull.plan.time_ms,
        num_blocks=pull.num_blocks,
        num_bytes=pull.num_bytes,
        elapsed_ms=1000 * pull.seconds(now),
        saved_ms=pull.saved_ms,
        ended_seconds=0.0 if pull.ended_at is None else now - pull.ended_at,
    )


def adapter_message(adapter: RegisteredAdapter, model: str) -> admin_pb2.Adapter:
    return admin_pb2.Adapter(
        name=adapter.name,
        fingerprint=adapter.fingerprint,
        path=adapter.path,
        rank=adapter.rank,
        num_bytes=adapter.num_bytes,
        tenant=adapter.tenant,
        model=model,
    )


def latencies_message(histograms: Sequence[Histogram]) -> cluster_pb2.Latencies:
    """Return the sum of histograms with the same buckets."""
    counts = zip(*(histogram.read().cumulative for histogram in histograms), strict=True)
    return cluster_pb2.Latencies(bounds_seconds=histograms[0].bounds, cumulative=map(sum, counts))
