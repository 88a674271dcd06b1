"""The study of eviction: no policy passes Belady's optimum, and a cache without limit is the ideal."""

import pytest

from bench.placement.caches import requests_of
from bench.placement.eviction import POLICIES, ideal, reuse
from bench.placement.simulation.workloads import GENERATORS

BLOCK = 64


@pytest.mark.parametrize("name", ["multi-turn", "uniform-groups"])
def test_no_policy_passes_belady_and_all_reach_the_ideal_with_enough_room(name: str) -> None:
    requests = requests_of(GENERATORS[name](3.0, 10.0, 1), BLOCK)
    most = ideal(requests, BLOCK)
    names = {block for request in requests for block in request.names}
    for num_blocks in (200, 400):
        found = {policy: reuse(requests, policy, num_blocks, BLOCK) for policy in POLICIES}
        assert max(found.values()) == found["Belady"] <= most
    for policy in POLICIES:
        assert reuse(requests, policy, len(names), BLOCK) == pytest.approx(most)


def test_a_conversation_goes_on_from_its_blocks() -> None:
    requests = requests_of(GENERATORS["multi-turn"](1.0, 10.0, 0), BLOCK)
    starts = [request.names[0] for request in requests]
    assert len(set(starts)) < len(starts)
