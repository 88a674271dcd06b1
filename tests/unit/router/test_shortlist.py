"""A placement that scores a few workers chooses as one that scores all: the table of loads says which few.

Property: whatever workers report, hold, and are given, the worker of least full cost is on the shortlist.
"""

from collections.abc import Mapping
from random import Random

import numpy as np
import pytest
from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.proto.index.holders import Holders, Roster
from blockyard.proto.index.schema import ANYWHERE_SUFFIX, identity, pack_berths
from blockyard.proto.naming.marks import marks
from blockyard.proto.step_costs import StepCosts, StepWork
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.depths import BerthDepths, CachedDepth
from blockyard.router.cluster.view import ClusterView
from blockyard.router.placement.columns import Columns, costs_of, row_of
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.policies import PlacementRequest, place
from blockyard.router.placement.pulls import Link, PullSource
from blockyard.router.placement.scoring import Candidate, score_all
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples

from .prompt import NAMES, PROMPT_TOKENS, Clock

CONFIG = PlacementConfig()
MOST = 4
RATES = st.one_of(st.just(0.0), st.floats(1.0, 1e6))
COUNTS = st.integers(0, 100_000)
OTHER = [bytes([200 + number]) * 16 for number in range(8)]
DEPTHS = st.dictionaries(st.integers(0, 39), st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40)


class Cluster:
    """A view of workers that a random history has changed."""

    def __init__(self, num_workers: int) -> None:
        self.clock = Clock()
        self.view = ClusterView(suspect_seconds=2.0, lost_seconds=6.0, clock=self.clock)
        self.placed: list[Placed] = []
        for number in range(num_workers):
            self.accept(number, life=1)

    def accept(self, number: int, life: int) -> None:
        name = str(number)
        known = {
            "worker_id": f"w{number}",
            "incarnation": f"{name}-{life}",
            "block_size": 16,
            "total_blocks": 1000,
        }
        kind = {"kv_layout": "layers=1", "kv_arithmetic": "kernels=cpu" if number % 3 else "kernels=torch"}
        hello = session_pb2.Hello(**known, transfer_port=number % 5, block_bytes=16_000, **kind)
        self.view.accepted(name, hello)

    def happen(self, random: Random) -> None:
        view, workers = self.view, self.view.workers()
        address = random.choice(workers).address
        match random.randrange(11):
            case 0:
                self.clock.now += random.choice([0.0, 0.3, 1.0])
            case 1:
                self.accept(int(address), life=random.randrange(3))
            case 2:
                view.draining(address, is_draining=random.random() < 0.5)
            case 3:
                view.disconnected(address, "ended")
            case 4:
                view.forget(address)
                view.known(address)
            case 5 | 6:
                names = NAMES[: random.randrange(31)] if random.random() < 0.7 else OTHER
                placed = view.placed(
                    address, names=names, prompt_tokens=PROMPT_TOKENS, uncached_tokens=200, blocks=9
                )
                self.placed.append(placed)
            case 7 if self.placed:
                placed = random.choice(self.placed)
                if not placed.sent:
                    view.sent(placed)
            case 8 if self.placed:
                placed = random.choice(self.placed)
                if placed.sent:
                    view.started(placed)
            case 10:
                view.arrived(address, marks(NAMES[: random.randrange(31)], 16))
            case 9 if self.placed:
                view.ended(self.placed.pop(random.randrange(len(self.placed))))

    def report(self, random: Random) -> None:
        for worker in self.view.workers():
            load = cluster_pb2.WorkerLoad(
                running=random.randrange(40),
                waiting=random.randrange(4),
                queued_prefill_tokens=random.choice([0, 0, random.randrange(100_000)]),
                context_tokens=random.randrange(200_000),
                used_blocks=random.randrange(1001),
                queued_pairs=random.choice([0, random.randrange(100_000_000)]),
                step_seconds=worker.load.step_seconds + random.choice([0.0, 0.2, 0.5]),
                steps=worker.load.steps + 5,
                prompt_steps=worker.load.prompt_steps + 2,
                step_prompt_tokens=worker.load.step_prompt_tokens + random.randrange(1, 5000),
                step_decodes=worker.load.step_decodes + random.randrange(50),
                step_context_tokens=worker.load.step_context_tokens + random.randrange(5000),
                step_pairs=worker.load.step_pairs + random.randrange(500_000),
                host_tokens_per_second=random.choice([0.0, 5e5]),
                pull_setup_seconds=random.choice([0.0, 0.002, 0.1]),
                pull_bytes_per_second=random.choice([0.0, 1e6, 1e9]),
                pulling_bytes=random.choice([0, 10_000_000]),
                lending_bytes=random.choice([0, 10_000_000]),
            )
            self.view.heard(worker.address, load)

    def check(self, depths: Mapping[WorkerId, CachedDepth], key: bytes) -> None:
        """Check the shortlist against all candidates, as any router's policy would choose."""
        arrived = self.view.arrived_depths(NAMES, 16)
        everyone = self.view.candidates(NAMES, PROMPT_TOKENS, depths, arrived)
        sources = self.view.pull_sources(depths, PROMPT_TOKENS, salt=7)
        some = self.view.shortlist(NAMES, PROMPT_TOKENS, depths, arrived, key=key, most=MOST, sources=sources)
        assert {candidate.address for candidate in some} <= {candidate.address for candidate in everyone}
        assert bool(some) == bool(everyone)
        if not everyone:
            return
        full = score_all(PROMPT_TOKENS, everyone, CONFIG, sources)
        costs = {score.address: score.cost for score in full}
        least = min(costs.values())
        assert min(costs[candidate.address] for candidate in some) <= 1.01 * least
        chosen = place(
            PlacementRequest(prompt_tokens=PROMPT_TOKENS), some, "prefix", Random(0), CONFIG, sources
        ).chosen
        assert chosen.cost == pytest.approx(costs[chosen.address])
        near = max(CONFIG.near_equal_ms, CONFIG.near_equal_fraction * least)
        assert costs[chosen.address] <= 1.01 * least + near


def by_worker(depths: Mapping[int, tuple[int, int]]) -> dict[WorkerId, CachedDepth]:
    return {
        WorkerId(f"w{number}"): CachedDepth(blocks=on_gpu, host_blocks=host)
        for number, (on_gpu, host) in depths.items()
        if on_gpu or host
    }


@examples(200, deadline=None)
@given(st.integers(1, 40), st.integers(0, 80), DEPTHS, st.binary(max_size=4), st.integers(0, 2**32))
def test_the_shortlist_has_the_worker_of_least_cost_after_any_history(
    num_workers: int, num_events: int, depths: dict[int, tuple[int, int]], key: bytes, seed: int
) -> None:
    cluster, random = Cluster(num_workers), Random(seed)
    cluster.check(by_worker(depths), key)
    for _ in range(num_events):
        cluster.happen(random)
    cluster.check({}, key)
    cluster.report(random)
    cluster.check(by_worker(depths), key)
    for _ in range(5):
        cluster.happen(random)
        cluster.check(by_worker(depths), key)
    cluster.view.check_invariants()


@settings(deadline=None)
@given(DEPTHS, st.sampled_from([1, 4]))
def test_depths_by_berth_are_those_by_worker(depths: dict[int, tuple[int, int]], stride_blocks: int) -> None:
    """Berths are given backwards. Each worker has an earlier, dead berth, and each second one a second number."""
    cluster = Cluster(40)
    owners, dead, expected = {}, [], {}
    by_depth: dict[int, list[int]] = {}
    for number in range(40):
        name = identity(WorkerId(f"w{number}"), Incarnation(f"{number}-1"))
        berth = 300 - 3 * number
        owners[berth] = owners[berth - 1] = name
        owners[berth - 2] = name + ANYWHERE_SUFFIX
        on_gpu, host = depths.get(number, (0, 0))
        dead.append(berth - 1)
        for numbered, depth in ((berth, on_gpu), (berth - 1, 30), (berth - 2, on_gpu + host)):
            by_depth.setdefault(depth, []).append(numbered)
        if on_gpu or host:
            expected[WorkerId(f"w{number}")] = CachedDepth(
                blocks=on_gpu * stride_blocks, host_blocks=host * stride_blocks
            )
    blocks = sorted(depth for depth in by_depth if depth)
    values = [
        pack_berths(berth for depth, berths in by_depth.items() if depth >= block for berth in berths)
        for block in blocks
    ]
    joined = [",".join(map(str, numbers)).encode() for numbers in (blocks, map(len, values), dead)]
    names = [name.encode() for name in owners.values()]
    sizes = ",".join(str(len(name)) for name in names).encode()
    roster = Roster.parse(b"1", ",".join(map(str, owners)).encode(), sizes, b"".join(names), most_bytes=99)
    holders = Holders.parse(
        [joined[0], joined[1], b"".join(values), joined[2]], roster, most=500, most_blocks=60
    )
    found = BerthDepths(holders, cluster.view.incarnations(), stride_blocks)
    assert found == expected
    assert len(found) == len(expected)
    few, same = (
        cluster.view.shortlist(NAMES, PROMPT_TOKENS, given, key=b"", most=MOST) for given in (found, expected)
    )
    assert few == same


WORKERS = st.lists(
    st.tuples(
        st.builds(
            Candidate,
            address=st.uuids().map(str),
            worker_id=st.just(WorkerId("a")),
            cached_tokens=st.integers(0, 40).map(lambda blocks: 16 * blocks),
            host_cached_tokens=st.integers(0, 40).map(lambda blocks: 16 * blocks),
            queued_prefill_tokens=COUNTS,
            queued_pairs=COUNTS,
            sequences=COUNTS,
            context_tokens=COUNTS,
            used_blocks=COUNTS,
            total_blocks=COUNTS,
            host_tokens_per_second=st.one_of(RATES, st.floats()),
            block_size=st.just(16),
            link=st.builds(
                Link,
                st.floats(0, 100),
                st.one_of(st.just(0.0), RATES),
                st.just(1000.0),
                st.integers(0, 10**8),
            ),
            adapter_ms=st.floats(0, 1e5),
        ),
        st.floats(0.1, 10.0),
    ),
    min_size=1,
    max_size=8,
)
"""Candidates, and the slowness of each."""


@given(WORKERS, st.integers(1500, 9000), st.booleans(), st.integers(0, 90))
def test_costs_of_columns_are_those_of_scores(workers, prompt_tokens, is_measured, source_blocks):
    step_costs = StepCosts()
    if is_measured:
        step_costs.observe(StepWork(1.0, 10, 5, 5000, 100, 40, 9000, 100_000))
    rows = np.array([row_of(candidate, slowness) for candidate, slowness in workers], float)

    def measured(candidate: Candidate, slowness: float) -> Candidate:
        step_seconds = step_costs.decode_seconds(candidate.sequences, candidate.context_tokens)
        return candidate._replace(
            prefill_tokens_per_second=step_costs.tokens_per_second / slowness,
            pair_tokens=step_costs.pair_tokens,
            decode_step_ms=1000 * slowness * step_seconds if candidate.sequences else 0.0,
        )

    candidates = [measured(*worker) for worker in workers]
    on_gpu = np.array([candidate.cached_tokens / 16 for candidate in candidates])
    host = np.array([candidate.host_cached_tokens / 16 for candidate in candidates])
    known = {"workers": Columns(*rows.T), "costs": step_costs, "config": CONFIG}
    known["adapter_ms"] = np.array([candidate.adapter_ms for candidate in candidates])
    both = [
        PullSource(WorkerId("s"), Incarnation("i"), "s:1", "s:2", blocks * 16, lending_bytes=10**6)
        for blocks in (source_blocks, source_blocks // 2)
    ]
    for sources in ([], both):
        costs = costs_of(prompt_tokens, on_gpu, on_gpu + host, sources=sources, **known)
        scores = score_all(prompt_tokens, candidates, CONFIG, sources)
        assert costs.tolist() == pytest.approx([score.total_ms for score in scores], rel=1e-9)


def test_equal_workers_are_all_chosen_in_time_and_alike_by_the_same_key_and_a_favourite_however_loaded() -> (
    None
):
    def listed(cluster: Cluster, number: int, **options: WorkerId) -> set[str]:
        few = cluster.view.shortlist([], 100, {}, key=bytes([number]), most=MOST, **options)
        return {candidate.address for candidate in few}

    cluster = Cluster(200)
    drawn = [listed(cluster, number) for number in range(256)]
    assert len(set().union(*drawn)) > 180
    assert listed(Cluster(200), 0) == drawn[0]
    cluster.view.heard("7", cluster_pb2.WorkerLoad(running=50))
    assert "7" in listed(cluster, 0, favourite=WorkerId("w7"))


def test_expected_prefixes_are_forgotten_though_no_prompt_asks_for_them_again() -> None:
    cluster = Cluster(40)
    for number in range(400):
        names = [number.to_bytes(16)]
        placed = cluster.view.placed(
            str(number % 40), names=names, prompt_tokens=17, uncached_tokens=17, blocks=2
        )
        cluster.view.sent(placed)
        cluster.view.started(placed)
        cluster.view.ended(placed)
        cluster.clock.now += 0.1
        for worker in range(40):
            cluster.view.heard(str(worker))
    assert len(cluster.view._expectations._noted) < 40
    assert len(cluster.view._expectations._workers) < 40
