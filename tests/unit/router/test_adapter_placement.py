"""The price of a LoRA adapter: requests stay where theirs is, and what many requests use is not evicted for few."""

from collections import Counter
from math import isfinite
from random import Random

import pytest
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.view import ClusterView
from blockyard.router.placement.adapters import (
    HORIZON_SECONDS,
    NOT_SERVED_MS,
    Adapter,
    AdapterSlots,
    Resident,
    adapter_ms,
    eviction_ms,
    load_ms,
)
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.policies import PlacementRequest, place
from blockyard.router.placement.scoring import score_all
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .candidates import candidate, chosen
from .prompt import Clock

CONFIG = PlacementConfig()
WANTED = Adapter("wanted", 50_000_000)
NAMES = st.sampled_from([f"adapter-{number}" for number in range(8)])
RESIDENTS = st.lists(
    st.builds(Resident, NAMES, st.floats(), st.floats(), st.booleans()),
    max_size=6,
    unique_by=lambda one: one.fingerprint,
)
SLOTS = st.builds(AdapterSlots, st.integers(1, 6), RESIDENTS, st.frozensets(NAMES, max_size=4), st.floats())


def resident(name: str, *, rate: float = 1.0, load: float = 20.0, is_used: bool = False) -> Resident:
    return Resident(name, load, rate, is_used)


@given(SLOTS)
def test_whatever_a_worker_reports_the_price_is_a_number_that_a_worker_without_slots_exceeds(slots):
    price = adapter_ms(WANTED, slots, CONFIG)
    assert isfinite(price)
    assert 0 <= price < NOT_SERVED_MS


@given(SLOTS)
def test_an_adapter_at_hand_costs_nothing_and_any_other_no_less(slots: AdapterSlots) -> None:
    for name in slots.at_hand:
        assert adapter_ms(Adapter(name), slots, CONFIG) == 0
    assert adapter_ms(WANTED, slots, CONFIG) >= load_ms(slots.load_ms, WANTED.num_bytes) > 0


@given(SLOTS, st.integers(0, 5), st.floats(0, 100), st.floats(0, 100))
def test_a_busier_victim_never_makes_its_slot_cheaper(slots: AdapterSlots, at: int, rate: float, more: float):
    if not slots.residents:
        return
    at %= len(slots.residents)

    def with_rate(requests_per_second: float) -> float:
        changed = [*slots.residents]
        changed[at] = changed[at]._replace(requests_per_second=requests_per_second)
        return eviction_ms(slots._replace(residents=changed), CONFIG)

    assert with_rate(rate) <= with_rate(rate + more)


@given(st.integers(1, 2**20), st.floats(0, 1e6))
def test_without_an_adapter_every_cost_is_as_before(prompt_tokens: int, price: float) -> None:
    """The term is an addend of its own: no other changes, and 0 changes nothing."""
    bare = candidate("a", sequences=3, queued_prefill_tokens=77, context_tokens=1234, used_blocks=950)
    (before,) = score_all(prompt_tokens, [bare], CONFIG)
    (after,) = score_all(prompt_tokens, [bare._replace(adapter_ms=price)], CONFIG)
    terms = before.queue_ms + before.decode_ms + before.memory_ms + before.prefill_ms
    assert before.cost == terms + before.host_load_ms + before.pull_ms + before.interference_ms
    assert before.total_ms == pytest.approx(before.cost)
    assert after == before._replace(adapter_ms=price, cost=before.cost + price)


def test_a_free_slot_costs_the_load_alone_and_a_full_worker_its_cheapest_idle_adapter() -> None:
    busy, idle = resident("busy", rate=2.0), resident("idle", rate=0.1)
    roomy = AdapterSlots(3, [busy, idle], load_ms=15.0)
    assert adapter_ms(WANTED, roomy, CONFIG) == 15.0
    full = roomy._replace(num_slots=2)
    assert adapter_ms(WANTED, full, CONFIG) == pytest.approx(15.0 + HORIZON_SECONDS * 0.1 * 20.0)
    used = full._replace(residents=[busy, idle._replace(is_used=True)])
    assert adapter_ms(WANTED, used, CONFIG) == pytest.approx(15.0 + HORIZON_SECONDS * 2.0 * 20.0)
    none = full._replace(residents=[one._replace(is_used=True) for one in (busy, idle)])
    assert adapter_ms(WANTED, none, CONFIG) == 15.0 + CONFIG.memory_full_ms, "it waits for a slot"


def test_adapters_that_come_take_free_slots_and_then_the_cheapest_victims() -> None:
    slots = AdapterSlots(2, [resident("a", rate=0.1), resident("b", rate=3.0)], load_ms=10.0)
    first = adapter_ms(WANTED, slots, CONFIG)
    after_one = adapter_ms(WANTED, slots._replace(coming=frozenset({"new"})), CONFIG)
    assert first == pytest.approx(10.0 + HORIZON_SECONDS * 0.1 * 20.0)
    assert after_one == pytest.approx(10.0 + HORIZON_SECONDS * 3.0 * 20.0)
    again = adapter_ms(WANTED, slots._replace(coming=frozenset({"a"})), CONFIG)
    assert again == after_one, "what an open request uses is no victim"


def test_an_unmeasured_load_is_guessed_by_bytes() -> None:
    small, large = (load_ms(0.0, size) for size in (10**6, 10**8))
    assert 0 < small < large
    assert load_ms(7.0, 10**8) == 7.0
    assert load_ms(float("nan"), 10**8) == large


def test_a_request_goes_to_its_adapter_until_waiting_costs_more_than_loading_elsewhere() -> None:
    request = PlacementRequest(prompt_tokens=100)
    other = candidate("other", adapter_ms=200.0)
    assert chosen(request, candidate("holder", queued_prefill_tokens=100), other) == "holder"
    assert chosen(request, candidate("holder", queued_prefill_tokens=400), other) == "other"


def view_of(num_workers: int, *, slots: int = 2) -> ClusterView:
    """Each fifth worker has no slots."""
    view = ClusterView(suspect_seconds=2.0, lost_seconds=6.0, clock=Clock())
    for number in range(num_workers):
        max_loras = 0 if number % 5 == 4 else slots
        known = {
            "worker_id": f"w{number}",
            "incarnation": f"{number}",
            "block_size": 16,
            "total_blocks": 1000,
        }
        view.accepted(str(number), session_pb2.Hello(**known, max_loras=max_loras))
    return view


def report(view: ClusterView, random: Random) -> None:
    for worker in view.workers():
        residents = [
            {
                "fingerprint": f"f{name}",
                "load_seconds": random.choice([0.0, 0.01, 0.5]),
                "running": random.randrange(2),
                "requests_per_second": random.choice([0.0, 0.5, 8.0]),
            }
            for name in random.sample(range(6), random.randrange(3))
        ]
        told = {"running": random.randrange(4), "adapter_load_seconds": random.choice([0.0, 0.02, 0.3])}
        view.heard(worker.address, cluster_pb2.WorkerLoad(adapters=residents, **told))


@examples(40)
@given(st.randoms(use_true_random=False), st.integers(0, 6))
def test_the_shortlist_has_the_worker_of_least_cost_with_the_adapter_and_only_able_ones(random, number):
    view = view_of(24)
    adapter = Adapter(f"f{number}", 10**7)
    view.shortlist((), 100, {}, key=b"")  # makes the table, which later events keep up to date
    for _ in range(3):
        report(view, random)
        for address in random.sample(range(24), 5):
            view.placed(
                str(address),
                names=(),
                prompt_tokens=100,
                uncached_tokens=100,
                blocks=7,
                adapter=random.choice(["", "f1", "f6"]),
            )
    for worker in random.sample(view.workers(), 3):
        worker.lacking.add(adapter.fingerprint)
    view.check_invariants()
    few = view.shortlist((), 100, {}, key=b"k", most=4, adapter=adapter)
    everyone = view.candidates((), 100, {}, adapter=adapter)
    able = {w.address for w in view.workers() if int(w.address) % 5 != 4 and not w.lacking}
    assert {one.address for one in everyone} == able >= {one.address for one in few}
    costs = [min(score.cost for score in score_all(100, found, CONFIG)) for found in (few, everyone)]
    assert costs[0] == pytest.approx(costs[1])


def test_a_burst_for_a_new_adapter_loads_it_once() -> None:
    """The first request books the load, so the others find it at hand before the worker has reported anything."""
    view, counts, rng, large = view_of(4), Counter[str](), Random(3), Adapter("large", 10**9)
    for _ in range(6):
        candidates = view.candidates((), 100, {}, adapter=large)
        address = place(PlacementRequest(prompt_tokens=100), candidates, "prefix", rng).chosen.address
        view.placed(
            address, names=(), prompt_tokens=0, uncached_tokens=0, blocks=0, adapter=large.fingerprint
        )
        counts[address] += 1
    assert len(counts) == 1, counts
