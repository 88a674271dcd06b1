"""No order of submits, cancels, forks, preemptions, evictions and failures breaks an invariant or changes a token."""

import random
from collections.abc import Set
from typing import Any

import pytest
from blockyard.worker.cache.host_memory import HostCache
from blockyard.worker.execution.step_moves import StepMoves
from blockyard.worker.scheduling.preemption import Victim
from blockyard.worker.sequences.identifiers import HostSlot
from blockyard.worker.sequences.sequence import SequenceState
from blockyard.worker.sequences.step_plan import StepPlan
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.properties import examples

from .storm import Storm, random_request

ACTIONS = 12_000
"""In each of these weathers."""
WEATHERS: dict[str, dict[str, Any]] = {
    "recompute, a step at a time": {
        "num_blocks": 12,
        "pipelined": False,
        "preemption": "recompute",
        "drafts": True,
    },
    "swap, a step ahead": {"num_blocks": 11, "pipelined": True, "preemption": "swap", "swap_blocks": 24},
    "drafts, a step ahead": {
        "num_blocks": 20,
        "pipelined": True,
        "drafts": True,
        "preemption": "swap",
        "block_size": 8,
        "swap_blocks": 40,
        "host_cache_blocks": 12,
    },
    "a draft model, a step ahead": {
        "num_blocks": 20,
        "pipelined": True,
        "draft_model": True,
        "preemption": "swap",
        "swap_blocks": 40,
        "host_cache_blocks": 12,
    },
    "both, host cache, a step ahead": {
        "num_blocks": 10,
        "pipelined": True,
        "preemption": "auto",
        "swap_blocks": 10,
        "host_cache_blocks": 12,
        "max_num_batched_tokens": 48,
    },
    "small blocks, host cache, a step at a time": {
        "num_blocks": 42,
        "pipelined": False,
        "preemption": "auto",
        "block_size": 4,
        "swap_blocks": 30,
        "host_cache_blocks": 25,
        "protected_blocks": 4,
        "max_preemptions": 1,
    },
    "prefixes that come back from host memory": {
        "num_blocks": 24,
        "pipelined": True,
        "preemption": "swap",
        "swap_blocks": 40,
        "host_cache_blocks": 60,
        "block_size": 8,
        "max_num_batched_tokens": 64,
    },
}


def blow(storm: Storm, chance: random.Random) -> None:
    """One action."""
    kind = chance.random()
    if kind < 0.2:
        if len(storm.scheduler.waiting) < 10:
            storm.submit(**random_request(chance))
    elif kind < 0.24:
        storm.cancel_request(-chance.randint(1, 12))
    elif kind < 0.27:
        storm.cancel_request(-chance.randint(1, 12), index=chance.randint(0, 2))
    elif kind < 0.273:
        storm.fail()
    elif kind < 0.275:
        storm.take_back(moved=kind < 0.274)
    elif kind < 0.285 and storm.scheduler.config.host_cache_blocks + storm.scheduler.config.swap_blocks:
        storm.break_next(chance.choice(["out", "in", "in", "copies", "after"]))
    elif kind < 0.3:
        storm.corrupt(chance.randrange(1000))
    elif kind < 0.315:
        storm.measure(
            chance.choice([0.0, 50.0]), chance.choice([0.0, 1.0, 1000.0]), chance.choice([None, 16])
        )
    elif kind < 0.33:
        storm.offer_room(chance.choice([0, 15, 40, 40]), chance.choice([10.0, 1e4, 1e4]))
    elif kind < 0.36:
        storm.receive(chance.randrange(100))
    elif kind < 0.38:
        storm.end_pull(chance.randrange(100))
    elif kind < 0.382:
        storm.late()
    elif kind < 0.4:
        storm.lend(chance.randrange(1000))
    elif kind < 0.415:
        storm.end_loan(chance.randrange(100))
    elif kind < 0.7:
        failing = frozenset({chance.randrange(6)}) if chance.random() < 0.01 else frozenset[int]()
        storm.plan(failing)
    else:
        storm.commit()


def weathered(weather: str, *, trouble: float = 0.0) -> tuple[Storm, int]:
    """A storm that is over, and how many waited at most. `trouble`: how often host memory fails beside all else."""
    chance = random.Random(weather)
    storm = Storm(**({"max_num_seqs": 8, "max_model_len": 160} | WEATHERS[weather]))
    most_waiting = 0
    for _ in range(ACTIONS):
        if trouble and chance.random() < trouble:
            storm.break_next(chance.choice(["in", "after"]))
            storm.corrupt(chance.randrange(1000))
        blow(storm, chance)
        storm.check()
        most_waiting = max(most_waiting, len(storm.scheduler.waiting))
    storm.finish()
    return storm, most_waiting


@pytest.mark.ci
@pytest.mark.fault(65)
@pytest.mark.parametrize("weather", WEATHERS)
def test_ten_thousand_actions_break_no_invariant_and_change_no_token(weather: str) -> None:
    storm, most_waiting = weathered(weather)
    scheduler = storm.scheduler
    # A storm in which nothing of it happened would prove nothing.
    assert most_waiting >= 5
    assert scheduler.num_preemptions > 10
    assert scheduler.pool.num_evictions > 100
    assert storm.device.moved["copies"] > 50
    assert (scheduler.num_swaps > 0) == (scheduler.config.swap_blocks > 0)
    assert scheduler.host_cache is None or scheduler.host_cache.num_evictions > 10
    assert len(storm.beams) > 5
    assert len(storm.embeddings) > 5
    assert storm.moved["lent"] > 20
    has_host_cache = scheduler.host_cache is not None
    assert all((storm.moved[kind] > 2) == has_host_cache for kind in ("pulled", "cut", "cancelled"))
    moves = has_host_cache and scheduler.config.preemption == "auto"
    assert (storm.moved["given back"] > 2) == moves
    has_host_memory = scheduler.config.swap_blocks + scheduler.config.host_cache_blocks > 0
    assert (storm.device.num_broken > 2) == has_host_memory
    assert storm.device.num_found_corrupted > 0 or scheduler.config.host_cache_blocks < 60
    speculation = scheduler.speculation
    assert speculation is None or 300 < speculation.num_right < 0.95 * speculation.num_drafted


def _made_from_the_first_again(moves: StepMoves, plan: StepPlan) -> None:
    """Unless all were made."""
    if moves._num_made.get(plan.step) != 3:
        moves._num_made.pop(plan.step, None)
    right(moves, plan)


def _made_with_each_part(moves: StepMoves, plan: StepPlan) -> None:
    moves._num_made.pop(plan.step, None)
    right(moves, plan)


right = StepMoves.make


def _forgets_the_slot_alone(host_cache: HostCache, slots: Set[HostSlot]) -> None:
    """And not what builds on it."""
    for name in [name for name, slot in host_cache._slots.items() if slot in slots]:
        host_cache._drop(name)


def _keeps_what_is_lost(host_cache: HostCache, slots: Set[HostSlot]) -> None:
    """Nothing is dropped."""


@pytest.mark.parametrize(
    ("owner", "method", "broken", "seen_as"),
    [
        (StepMoves, "make", _made_from_the_first_again, "not its own|other content"),
        (StepMoves, "make", _made_with_each_part, "not its own|other content"),
        (HostCache, "drop", _keeps_what_is_lost, "read again"),
        (HostCache, "drop", _forgets_the_slot_alone, "a gap"),
    ],
)
def test_a_storm_sees_moves_made_twice_and_lost_blocks_kept(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Any, seen_as: str
) -> None:
    """Mutants of what a step that is run again owes to host memory."""
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(AssertionError, match=seen_as):
        weathered("prefixes that come back from host memory", trouble=0.1)


class StormMachine(RuleBasedStateMachine):
    """The same actions in an order that hypothesis chooses, and shortens where it breaks anything."""

    @initialize(
        num_blocks=st.integers(6, 16),
        pipelined=st.booleans(),
        preemption=st.sampled_from(["auto", "swap", "recompute"]),
        swap_blocks=st.sampled_from([0, 4, 30]),
        host_cache_blocks=st.sampled_from([0, 3, 20]),
        max_num_batched_tokens=st.sampled_from([20, 48, 300]),
        max_preemptions=st.integers(1, 3),
        protected_blocks=st.integers(0, 4),
    )
    def begin(self, num_blocks: int, pipelined: bool, **settings: Any) -> None:
        self.storm = Storm(num_blocks, pipelined=pipelined, max_num_seqs=8, max_model_len=96, **settings)

    @rule(seed=st.integers(0, 10_000))
    def submit(self, seed: int) -> None:
        self.storm.submit(**random_request(random.Random(seed)))

    @rule(number=st.integers(-8, -1), index=st.sampled_from([None, None, 0, 1]))
    def cancel(self, number: int, index: int | None) -> None:
        self.storm.cancel_request(number, index)

    @rule(steps=st.integers(1, 6), failing=st.sampled_from([None, None, None, 0, 1]))
    def turn(self, steps: int, failing: int | None) -> None:
        for _ in range(steps):
            self.storm.plan(frozenset() if failing is None else frozenset({failing}))
            self.storm.check()

    @rule()
    def commit(self) -> None:
        self.storm.commit()

    @rule(number=st.integers(0, 3), blocks=st.integers(1, 4))
    def receive(self, number: int, blocks: int) -> None:
        for _ in range(blocks):
            self.storm.receive(number)

    @rule(number=st.integers(0, 3))
    def end_pull(self, number: int) -> None:
        self.storm.end_pull(number)

    @rule(num_blocks=st.sampled_from([0, 3, 30]), rate=st.sampled_from([10.0, 1e4]))
    def offer_room(self, num_blocks: int, rate: float) -> None:
        self.storm.offer_room(num_blocks, rate)

    @rule()
    def late(self) -> None:
        self.storm.late()

    @rule(number=st.integers(0, 9))
    def lend(self, number: int) -> None:
        self.storm.lend(number)

    @rule(number=st.integers(0, 3))
    def end_loan(self, number: int) -> None:
        self.storm.end_loan(number)

    @rule()
    def fail(self) -> None:
        self.storm.fail()

    @rule(moved=st.booleans())
    def take_back(self, moved: bool) -> None:
        self.storm.take_back(moved=moved)

    @rule(kind=st.sampled_from(["out", "in", "copies", "after"]))
    def break_next(self, kind: str) -> None:
        self.storm.break_next(kind)

    @rule(number=st.integers(0, 50))
    def corrupt(self, number: int) -> None:
        self.storm.corrupt(number)

    @rule(
        prefill=st.sampled_from([0.0, 50.0]),
        swap=st.sampled_from([0.0, 1.0, 1000.0]),
        beside=st.sampled_from([None, 16]),
    )
    def measure(self, prefill: float, swap: float, beside: int | None) -> None:
        self.storm.measure(prefill, swap, beside)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "storm"):
            self.storm.check()

    def teardown(self) -> None:
        if hasattr(self, "storm"):
            self.storm.finish()


StormMachine.TestCase.settings = examples(40, stateful_step_count=40, deadline=None)
test_no_order_of_actions_breaks_anything = StormMachine.TestCase


@pytest.mark.parametrize(("prompt", "outputs", "max_tokens"), [(63, 5, 40), (8, 3, 152), (150, 2, 10)])
def test_outputs_of_one_request_make_room_for_each_other(prompt: int, outputs: int, max_tokens: int) -> None:
    """They have one rank, share what none of them frees alone, and together need more than there is."""
    storm = Storm(10, pipelined=False, max_model_len=160)
    storm.submit(list(range(1, prompt + 1)), n=outputs, max_tokens=max_tokens)
    storm.finish()
    assert len(storm.sequences) == outputs
    assert storm.scheduler.num_preemptions > 0


def part_beams(num_blocks: int) -> Storm:
    """Preempt two beams and bring one back, with room reserved for all that both can need. The other waits."""
    storm = Storm(num_blocks, pipelined=False, max_num_batched_tokens=4, max_num_seqs=4, max_preemptions=1)
    storm.submit(list(range(1, 41)), beam_width=2, max_tokens=40)
    for _ in range(14):
        storm.plan()
    storm.commit()
    beams = tuple(storm.scheduler.running)
    storm.scheduler._preempt(Victim(beams, swaps=False))
    storm.plan()
    assert [beam.state for beam in beams] == [SequenceState.RUNNING, SequenceState.WAITING]
    assert beams[0].is_reserved
    return storm


def test_a_beam_that_waits_for_its_mate_is_not_kept_waiting_by_the_more_urgent() -> None:
    storm = part_beams(20)
    storm.submit(list(range(100, 299)), max_tokens=100, priority=-1)
    storm.finish()
    assert len(storm.beams) == 1


def test_the_room_kept_for_a_search_is_room_for_each_of_its_beams() -> None:
    storm = Storm(12, pipelined=False, max_num_batched_tokens=4, max_num_seqs=4, max_preemptions=1)
    storm.submit(list(range(100, 120)), max_tokens=100, priority=-1)
    storm.submit(list(range(1, 41)), beam_width=2, max_tokens=40)
    while not (beams := tuple(s for s in storm.scheduler.running if s.group is not None))[1:]:
        storm.plan()
        storm.commit()
    storm.scheduler._preempt(Victim(beams, swaps=False))
    storm.finish()
    assert len(storm.beams) == 1


def test_a_block_that_another_has_confirmed_first_leaves_no_name_before_it_unconfirmed() -> None:
    """Two copies of one prompt share its second block, but not its first.

    The first request computes its whole prompt, although a part is cached. The second finds the cached copy of the
    first block and the other request's second block. It is one token long and so comes first in the step.
    """
    storm = Storm(20, pipelined=False, max_model_len=320, max_num_batched_tokens=64, max_num_seqs=4)
    prompt = list(range(1, 34))
    storm.submit(prompt[:20], max_tokens=1)
    storm.finish()
    storm.submit(prompt, max_tokens=20, prompt_logprobs=0)
    storm.submit(prompt, max_tokens=20)
    storm.plan()
    storm.commit()
    first, second = storm.scheduler.running
    assert first.block_table[0] != second.block_table[0]
    assert first.block_table[1] == second.block_table[1]
    assert not any(storm.scheduler.cache.is_unconfirmed(block) for block in first.block_table[:2])
    storm.finish()
