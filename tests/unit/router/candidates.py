"""Short constructors for candidate workers and views of them: 1,000 blocks, and a millisecond for a prompt token."""

from random import Random
from typing import Any

from blockyard.proto.index.contract import WorkerId
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.view import ClusterView
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.placement.policies import PlacementRequest, place
from blockyard.router.placement.scoring import Candidate

from .prompt import Clock


def candidate(name: str, **beliefs: float) -> Candidate:
    return Candidate(
        address=f"{name}:1",
        worker_id=WorkerId(name),
        total_blocks=1000,
        **{"prefill_tokens_per_second": 1000.0, **beliefs},
    )


def chosen(
    request: PlacementRequest,
    *candidates: Candidate,
    policy: PolicyName = "prefix",
    seed: int = 0,
    config: PlacementConfig | None = None,
) -> str:
    return place(request, candidates, policy, Random(seed), config).chosen.worker_id


def view_of(*names: str, config: PlacementConfig | None = None, **hello: Any) -> tuple[ClusterView, Clock]:
    clock = Clock()
    view = ClusterView(suspect_seconds=2.0, lost_seconds=6.0, clock=clock, config=config)
    for name in names:
        view.accepted(name, hello_of(name, **hello))
    return view, clock


def hello_of(name: str, **fields: Any) -> session_pb2.Hello:
    known = {"worker_id": name, "incarnation": f"{name}1", "block_size": 16, "total_blocks": 1000}
    return session_pb2.Hello(**(known | fields))
