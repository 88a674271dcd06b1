"""The studies of placement: runs that are kept, floors beside rivals, eviction, agents' hints and several routers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from blockyard.deploy.bench.workloads.mooncake import write_trace
from blockyard.proto.index.contract import ApplyResult, Batch, Incarnation, WorkerId, WorkerRecord

from bench.placement import hints
from bench.placement.caches import requests_of
from bench.placement.eviction import POLICIES, ideal, reuse
from bench.placement.simulation.late_index import LateTwin
from bench.placement.simulation.simulator import Result, Setup
from bench.placement.simulation.study import Job, Load, Table
from bench.placement.simulation.workloads import GENERATORS, tool_agents, uniform_groups
from bench.placement.text import rival_floor

LOAD = Load(workload="uniform-groups", rate=2, seconds=1, num_workers=2)
BLOCK = 64


@pytest.fixture(scope="module")
def result() -> Result:
    return Job(load=LOAD, setup=Setup()).run()


def test_seeds_have_parts_of_a_trace_without_overlap(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    whole = uniform_groups(5.0, 12.0, 0)
    write_trace(whole, trace, block_tokens=16)
    load = Load(workload="trace", rate=2, seconds=2, trace=str(trace))
    parts = [load.build(seed) for seed in range(3)]
    assert sum(len(part.requests) for part in parts) == len(whole.requests)
    for part in parts:
        assert all(0 <= request.arrival_seconds < 2 for request in part.requests)
    with pytest.raises(ValueError, match="is over before second 6"):
        load.build(3)


@pytest.mark.parametrize(
    ("ours", "theirs", "holds"),
    [
        ((0.5, 0.6), (0.5, 0.6), True),
        ((0.49, 0.62), (0.5, 0.6), True),
        ((0.495, 0.594), (0.5, 0.6), False),
        ((0.3, 0.8), (0.5, 0.9), False),
    ],
    ids=["equal", "within the spread", "always behind", "far behind"],
)
def test_a_floor_beside_a_rival_allows_the_spread_of_the_seeds(
    result: Result, ours: tuple[float, ...], theirs: tuple[float, ...], holds: bool
) -> None:
    table = Table()
    for tag, values in (("prefix", ours), ("dynamo", theirs)):
        for seed, share in enumerate(values):
            table.add(Job(load=LOAD, setup=Setup(seed=seed), tag=tag), replace(result, reuse=share))
    assert rival_floor(table, LOAD, "dynamo", "reuse").holds is holds


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


def test_an_exact_hint_is_the_pause_until_the_next_request_and_the_last_has_none() -> None:
    workload = hints.hinted(tool_agents(0.2, 30.0, 1), hints.HINTS["exact"], 1)
    followers = {each.follows: each for each in workload.requests}
    for each in workload.requests:
        follower = followers.get(each.number)
        assert each.expected_pause_seconds == (0.0 if follower is None else follower.arrival_seconds)


def test_liars_share_no_token_and_no_number_with_agents() -> None:
    agents = tool_agents(0.2, 30.0, 1)
    full = hints.with_liars(agents, 30.0, 1)
    lies = full.requests[len(agents.requests) :]
    assert full.requests[: len(agents.requests)] == agents.requests
    assert len({each.number for each in full.requests}) == len(full.requests)
    last = max(run.base + run.length for each in agents.requests for run in (*each.prompt, each.output))
    assert lies
    assert min(run.base for each in lies for run in each.prompt) >= last
    assert all(each.expected_pause_seconds for each in lies)


def test_the_truth_pays_where_memory_is_short_and_changes_nothing_where_it_is_not() -> None:
    none, exact = hints.CASES[:2]
    assert hints.BASES[exact] == none == replace(exact, hint="none")
    short = [[hints.reuse(case, 2000, 120.0, seed) for seed in range(2)] for case in (none, exact)]
    assert fmean(short[1]) > fmean(short[0]) + 0.02
    assert hints.reuse(exact, 50_000, 60.0, 0) == hints.reuse(none, 50_000, 60.0, 0)


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
