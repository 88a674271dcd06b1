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
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .storm import Storm
from .weather import WEATHERS, blow, weathered

ACTIONS = 1000
"""In each weather. tests/nightly/worker/test_storm.py has more."""


@pytest.mark.parametrize("weather", WEATHERS)
def test_a_thousand_actions_break_no_invariant_and_change_no_token(weather: str) -> None:
    storm, most_waiting = weathered(weather, ACTIONS)
    # A storm in which nothing of it happened would prove nothing.
    assert most_waiting >= 5
    assert storm.scheduler.num_preemptions
    assert storm.scheduler.pool.num_evictions > 5
    assert storm.device.moved["copies"]
    assert storm.beams
    assert storm.embeddings
    assert storm.moved["lent"]


@examples(60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    actions=st.integers(1, 200),
    num_blocks=st.integers(6, 16),
    pipelined=st.booleans(),
    preemption=st.sampled_from(["auto", "swap", "recompute"]),
    swap_blocks=st.sampled_from([0, 4, 30]),
    host_cache_blocks=st.sampled_from([0, 3, 20]),
    max_num_batched_tokens=st.sampled_from([20, 48, 300]),
    max_preemptions=st.integers(1, 3),
    protected_blocks=st.integers(0, 4),
)
def test_no_order_of_actions_breaks_anything_in_any_scheduler(
    seed: int, actions: int, num_blocks: int, pipelined: bool, **settings: Any
) -> None:
    """Rare actions are frequent here. Hypothesis shortens a storm that breaks anything."""
    chance = random.Random(seed)
    storm = Storm(num_blocks, pipelined=pipelined, max_num_seqs=8, max_model_len=96, **settings)
    for _ in range(actions):
        blow(storm, chance, rare=0.4)
        storm.check()
    storm.finish()


make = StepMoves.make


def _all_is_made_again(moves: StepMoves, plan: StepPlan) -> None:
    """Instead of once only, where a step is run again in parts."""
    moves._num_made.pop(plan.step, None)
    make(moves, plan)


def _keeps_what_is_lost(host_cache: HostCache, slots: Set[HostSlot]) -> None:
    """Nothing is dropped."""


@pytest.mark.parametrize(
    ("owner", "method", "broken", "seen_as"),
    [
        (StepMoves, "make", _all_is_made_again, "not its own|other content"),
        (HostCache, "drop", _keeps_what_is_lost, "read again"),
    ],
)
def test_a_storm_sees_moves_made_twice_and_lost_blocks_kept(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Any, seen_as: str
) -> None:
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(AssertionError, match=seen_as):
        weathered("prefixes that come back from host memory", 12_000, trouble=0.1)


@pytest.mark.parametrize(("prompt", "outputs", "max_tokens"), [(63, 5, 40), (8, 3, 152), (150, 2, 10)])
def test_outputs_of_one_request_make_room_for_each_other(prompt: int, outputs: int, max_tokens: int) -> None:
    """They have one rank, share what none of them frees alone, and together need more than there is."""
    storm = Storm(10, pipelined=False, max_model_len=160)
    storm.submit(list(range(1, prompt + 1)), n=outputs, max_tokens=max_tokens)
    storm.finish()
    assert len(storm.sequences) == outputs
    assert storm.scheduler.num_preemptions > 0


def test_a_beam_that_waits_for_its_mate_is_not_kept_waiting_by_the_more_urgent() -> None:
    """Two beams are preempted and one comes back, with room reserved for all that both can need. The other waits."""
    storm = Storm(20, pipelined=False, max_num_batched_tokens=4, max_num_seqs=4, max_preemptions=1)
    storm.submit(list(range(1, 41)), beam_width=2, max_tokens=40)
    for _ in range(14):
        storm.plan()
    storm.commit()
    beams = tuple(storm.scheduler.running)
    storm.scheduler._preempt(Victim(beams, swaps=False))
    storm.plan()
    assert [beam.state for beam in beams] == [SequenceState.RUNNING, SequenceState.WAITING]
    assert beams[0].is_reserved
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
