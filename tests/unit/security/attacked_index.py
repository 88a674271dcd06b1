"""Cluster, blocks and workers of the tests of an attacked index."""

from hashlib import sha256

from blockyard.proto.index.contract import Incarnation, WorkerId, WorkerRecord

CLUSTER = "default"
BLOCK_SIZE = 16
NAMES = tuple(sha256(bytes([position])).digest()[:16] for position in range(24))
MOST_LINES = 60_000
"""Bound on the lines of Python in one callback of the event loop."""


def record(worker_id: str, address: str, incarnation: str = "") -> WorkerRecord:
    return WorkerRecord(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation or f"life-{worker_id}"),
        address=address,
        fingerprint="model",
        block_size=BLOCK_SIZE,
    )
