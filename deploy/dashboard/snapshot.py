"""Snapshot of a cluster for the page: the workers and routers with their states, and each pool as cells. Pure.

A worker's state is the worse of what its supervisor and a router report. A dead worker stays on the page until its next
incarnation serves. Counts come from GetBlockPool and are never added up from the cells.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from blockyard.deploy.dashboard.announcement import AnnouncedReplica, Announcement
from blockyard.proto.v1 import cluster_pb2

MAX_CELLS = 1024
"""Limit on the cells of a pool. A larger pool has several blocks in each cell."""
MAX_PULLS = 100
"""Limit on the pulls that the page shows."""
ANSWERING = frozenset(
    {
        cluster_pb2.WORKER_STATE_READY,
        cluster_pb2.WORKER_STATE_DRAINING,
        cluster_pb2.WORKER_STATE_SUSPECT,
    }
)
STATES = {
    cluster_pb2.WORKER_STATE_CONNECTING: "connecting",
    cluster_pb2.WORKER_STATE_READY: "ready",
    cluster_pb2.WORKER_STATE_SUSPECT: "silent",
    cluster_pb2.WORKER_STATE_REFUSED: "refused",
    cluster_pb2.WORKER_STATE_LOST: "dead",
    cluster_pb2.WORKER_STATE_DRAINING: "draining",
}
INDEX_STATES = {
    cluster_pb2.INDEX_STATE_ABSENT: "absent",
    cluster_pb2.INDEX_STATE_EXACT: "exact",
    cluster_pb2.INDEX_STATE_DEGRADED: "degraded",
}
Flags = np.ndarray[Any, np.dtype[np.bool_]]
UP = frozenset({"serving", "draining"})


def of_nothing(announcement: Announcement, trouble: str = "") -> dict[str, Any]:
    """Return the picture without any router's answer, from the supervisor's announcement alone."""
    return {
        "cluster": announcement.cluster,
        "model": announcement.model,
        "trouble": trouble,
        "router": None,
        "routers": _routers(announcement),
        "info": None,
        "workers": [_card(replica, None, None) for replica in announcement.workers],
    }


def drawn(
    announcement: Announcement,
    info: cluster_pb2.ClusterInfo,
    workers: Iterable[cluster_pb2.Worker],
    pools: Mapping[str, cluster_pb2.BlockPool],
) -> dict[str, Any]:
    known = {worker.worker_id: worker for worker in workers if worker.worker_id}
    cards = [
        _card(replica, known.pop(replica.name, None), pools.get(replica.name))
        for replica in announcement.workers
    ]
    # Workers of other supervisors, or of none.
    cards += [_card(None, worker, pools.get(worker_id)) for worker_id, worker in known.items()]
    return of_nothing(announcement) | {
        "info": {
            "models": [model.id for model in info.models] or [info.model.id],
            "version": info.version,
            "policy": info.policy,
            "index": INDEX_STATES.get(info.index_state, "unknown"),
            "workers_ready": info.workers_ready,
            "requests_running": info.requests_running,
            "requests_waiting": info.requests_waiting,
            "migrations": info.migrations,
        },
        "workers": cards,
    }


def _routers(announcement: Announcement) -> list[dict[str, Any]]:
    return [
        {"name": replica.name, "address": replica.address, "phase": replica.phase}
        for replica in announcement.replicas
        if replica.kind == "router"
    ]


def _card(
    replica: AnnouncedReplica | None, worker: cluster_pb2.Worker | None, pool: cluster_pb2.BlockPool | None
) -> dict[str, Any]:
    state, reason = state_of(replica, worker)
    card: dict[str, Any] = {
        "name": replica.name if replica else worker.worker_id if worker else "",
        "model": (worker.model if worker else "") or (replica.model if replica else ""),
        "state": state,
        "reason": reason,
        "starts": replica.num_starts if replica else None,
        "node": replica.node if replica else "",
        "ranks": [{"node": node, "pid": pid} for node, pid in replica.ranks] if replica else [],
        "address": replica.address if replica else "",
        "incarnation": replica.incarnation if replica else "",
        "device": "",
        "role": "",
        "pool": None if pool is None else pool_message(pool),
    }
    if worker is not None:
        card |= {
            "address": worker.address,
            "incarnation": worker.incarnation,
            "device": worker.device,
            "role": "" if worker.role == "both" else worker.role,
            "engine": worker.engine,
            "silent_seconds": round(worker.seconds_since_heard, 1),
        }
    return card


def state_of(replica: AnnouncedReplica | None, worker: cluster_pb2.Worker | None) -> tuple[str, str]:
    """Return a word for a worker's state, and the reason in a sentence, which may be empty."""
    if replica is not None and replica.phase not in UP:
        if replica.phase == "stopped":
            return "stopped", "it was drained and has ended; `blockyard restart` starts it again"
        if replica.num_starts:
            return "dead", f"its process has ended; start number {replica.num_starts + 1} is in progress"
        return "starting", "it loads the model"
    if worker is None:
        return "connecting", "no router is connected to it yet"
    return STATES.get(worker.state, "unknown"), worker.state_reason


def pool_message(pool: cluster_pb2.BlockPool) -> dict[str, Any]:
    load = pool.load
    return {
        "incarnation": pool.incarnation,
        "total": pool.total_blocks,
        "free": pool.free_blocks,
        "cached": pool.cached_blocks,
        "used": pool.used_blocks,
        "block_size": pool.block_size,
        "bytes_per_block": pool.bytes_per_block,
        "host_total": pool.host_cache_blocks,
        "host_cached": load.host_cached_blocks,
        "running": load.running,
        "waiting": load.waiting,
        "prompt_tokens": load.prompt_tokens,
        "cached_tokens": load.cached_tokens,
        "generated_tokens": load.generated_tokens,
        "evictions": pool.evictions,
        "preemptions": load.preemptions,
        "swaps": load.swaps,
        "pulled_blocks": load.pulled_blocks,
        "lent_blocks": load.lent_blocks,
        **cells(pool),
    }


def pulls_dict(infos: Mapping[str, cluster_pb2.ClusterInfo | None]) -> dict[str, Any]:
    """Return the pulls of all routers that run or ended lately, newest first. None: the router does not answer."""
    pulls = [
        _pull_dict(router, pull) for router, info in infos.items() if info is not None for pull in info.pulls
    ]
    pulls.sort(
        key=lambda pull: (bool(pull["end"]), pull["ended_seconds"] if pull["end"] else pull["elapsed_ms"])
    )
    return {
        "silent": sorted(router for router, info in infos.items() if info is None),
        "pulls": pulls[:MAX_PULLS],
    }


def _pull_dict(router: str, pull: cluster_pb2.RecentPull) -> dict[str, Any]:
    return {
        "router": router,
        "number": pull.number,
        "worker": pull.worker_id,
        "source": pull.source_id,
        "end": pull.end,
        "planned_bytes": pull.planned_bytes,
        "planned_ms": round(pull.planned_ms, 1),
        "blocks": pull.num_blocks,
        "bytes": pull.num_bytes,
        "elapsed_ms": round(pull.elapsed_ms, 1),
        "saved_ms": round(pull.saved_ms, 1),
        "ended_seconds": round(pull.ended_seconds, 1),
    }


def cells(pool: cluster_pb2.BlockPool) -> dict[str, Any]:
    """Group a pool's blocks into cells of `scale` blocks.

    Each cell has the number of used, shared and cached blocks, and the largest number of sequences on one block.
    """
    if not pool.runs:
        return {"scale": 1, "cell_used": [], "cell_shared": [], "cell_cached": [], "cell_holders": []}
    lengths = np.array([run.length for run in pool.runs])
    states = np.repeat(np.array([run.state for run in pool.runs]), lengths)
    references = np.repeat(np.array([run.references for run in pool.runs]), lengths)
    scale = -(-len(states) // MAX_CELLS)
    starts = np.arange(0, len(states), scale)

    def counts(flags: Flags) -> list[int]:
        found: list[int] = np.add.reduceat(flags.astype(np.int64), starts).tolist()
        return found

    return {
        "scale": scale,
        "cell_used": counts(states == cluster_pb2.BLOCK_STATE_USED),
        "cell_shared": counts(references > 1),
        "cell_cached": counts(states == cluster_pb2.BLOCK_STATE_CACHED),
        "cell_holders": np.maximum.reduceat(references, starts).tolist(),
    }
