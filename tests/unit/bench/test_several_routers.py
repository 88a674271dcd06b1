"""Several routers, and an index that is late, reuse nearly as much as one router with an index in time."""

from collections.abc import Callable

import pytest
from blockyard.deploy.bench.workloads.requests import Run, Workload
from blockyard.proto.index.contract import ApplyResult, Batch, Incarnation, WorkerId, WorkerRecord

from bench.placement.simulation.late_index import LateTwin
from bench.placement.simulation.simulator import Result, Setup, simulate
from bench.placement.simulation.workloads import independent

SHARED_TOKENS = 2000
SEED = 3


def burst(rate: float) -> Workload:
    """Make about 150 requests over 15 groups."""
    return independent(
        "burst", "15 groups", rate, 150 / rate, SEED,
        systems=(Run(0, SHARED_TOKENS),) * 15, prompt_tokens=(40, 40), output_tokens=(4, 8),
    )  # fmt: skip


def outcome(rate: float, *, num_routers: int = 1, lag_seconds: float = 0.0) -> Result:
    setup = Setup(num_workers=4, num_routers=num_routers, index_lag_seconds=lag_seconds, seed=SEED)
    return simulate(burst(rate), setup)


@pytest.mark.ci
@pytest.mark.parametrize("lag_seconds", [0.0, 5.0], ids=["in time", "5 s late"])
def test_eight_routers_reuse_what_one_does_in_a_burst(lag_seconds: float) -> None:
    """The index learns of a prefix only when it is computed, and by then the burst is over."""
    one, eight = outcome(150.0), outcome(150.0, num_routers=8, lag_seconds=lag_seconds)
    assert one.reuse >= 0.97 * one.ideal_reuse, one
    assert eight.reuse >= 0.97 * one.reuse, (one, eight)
    assert eight.ttft_mean <= 1.1 * one.ttft_mean, (one, eight)


@pytest.mark.ci
def test_a_late_index_costs_one_router_nothing() -> None:
    assert outcome(30.0, lag_seconds=5.0).reuse >= 0.97 * outcome(30.0).reuse


async def test_look_ups_see_a_batch_after_the_lag_and_not_before() -> None:
    delayed: list[tuple[float, Callable[[], object]]] = []
    twin = LateTwin(lambda: 0.0, lambda seconds, action: delayed.append((seconds, action)), 5.0)
    record = WorkerRecord(
        worker_id=WorkerId("a"),
        incarnation=Incarnation("1"),
        address="a:1",
        fingerprint="model",
        block_size=16,
    )
    berth = await twin.register(record, lease_seconds=3.0)
    batch = Batch(sequence=1, added=(bytes(16),))
    assert await twin.apply(berth, batch) is ApplyResult.OK
    assert await twin.apply(berth, batch) is ApplyResult.DUPLICATE
    assert await twin.lookup([bytes(16)]) == []
    ((seconds, action),) = delayed
    assert seconds == 5.0
    action()
    assert [holder.depth for holder in await twin.lookup([bytes(16)])] == [1]
