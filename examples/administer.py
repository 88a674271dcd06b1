"""Inspect a cluster, empty its caches, drain a worker and resume it: python examples/administer.py [HOST:PORT]

On a cluster with tokens BLOCKYARD_TOKEN must be an admin's.
"""

import sys

from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


def state(worker: cluster_pb2.Worker) -> str:
    return cluster_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_")


with Client(ADDRESS) as client:
    info = client.cluster_info()
    print(f"{info.model.id} on {info.workers_ready} workers, policy {info.policy}, version {info.version}")
    for worker in client.list_workers():
        pool = client.block_pool(worker.worker_id)
        print(
            f"{worker.worker_id} {state(worker)}: {pool.used_blocks} used, {pool.cached_blocks} cached, ",
            end="",
        )
        print(f"{pool.free_blocks} free of {pool.total_blocks} blocks")

    flushed = client.flush_cache()
    print(f"flushed {flushed.flushed_blocks} cached blocks")

    name = client.list_workers()[0].worker_id
    moved = client.drain_worker(name, grace_seconds=5.0)  # returns once nothing runs on that worker
    print(f"drained {name}: {moved} requests moved to other workers")
    answer = client.generate("def f(x):", max_tokens=8)
    print(f"meanwhile {answer.finish.worker_id} answers")
    client.resume_worker(name)
    print(f"{name} takes requests again")
