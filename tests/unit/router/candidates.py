"""Short constructors for candidate workers: 1,000 blocks and 1,000 prompt tokens a second, one millisecond each."""

from random import Random

from blockyard.proto.index.contract import WorkerId
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.placement.policies import PlacementRequest, place
from blockyard.router.placement.scoring import Candidate


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
