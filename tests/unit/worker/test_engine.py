"""The engine around scheduler and runner: deadlines, failing steps, load, cancels and priorities."""

import pytest
from blockyard.worker.engine import Engine
from blockyard.worker.sequences.sequence import FinishReason, SequenceState
from blockyard.worker.sequences.step_plan import StepPlan, StepTokens
from blockyard.worker.simulated.runner import SimulatedRunner

from .engines import Clock, make_engine, outputs_of, request


class FailsAt(SimulatedRunner):
    """Raises in one of its steps, as a kernel might."""

    failing_step = 2

    def execute(self, plan: StepPlan) -> StepTokens:
        if plan.step == self.failing_step:
            raise RuntimeError("a kernel failed")
        return super().execute(plan)


def test_a_sequence_past_its_deadline_ends_and_frees_its_blocks() -> None:
    engine = make_engine()
    engine.submit(request(max_tokens=50, deadline=0.35))
    outputs = outputs_of(engine)
    assert [not output.token_ids for output in outputs] == [False] * 4 + [True]
    assert outputs[-1].expired
    assert engine.pool.num_used == 0


def test_a_step_that_raises_ends_its_requests_and_the_next_one_is_served() -> None:
    engine = make_engine(runner=FailsAt)
    engine.submit(request(max_tokens=9))
    assert outputs_of(engine)[-1].state is SequenceState.FAILED
    engine.submit(request(30))
    assert outputs_of(engine)[-1].finish_reason is FinishReason.LENGTH
    assert engine.pool.num_used == 0


def test_small_prefills_do_not_pass_for_the_prefill_rate() -> None:
    """They compute about 10 tokens a step, 90 a second. 1,024 tokens in one step would be 911 a second."""
    engine = make_engine()
    for length in (400, *range(402, 420)):
        engine.submit(request(length, max_tokens=1))
        outputs_of(engine)
    assert engine.load().prefill_tokens_per_second == pytest.approx(911, rel=0.25)


def test_load_counts_what_runs_and_what_was_reused() -> None:
    engine = make_engine()
    engine.submit(request(33))
    engine.submit(request(33))
    assert engine.load().queued_prefill_tokens == 33 + 1, "the second waits for the first one's two blocks"
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.queued_prefill_tokens) == (2, 0, 0)
    assert (load.prompt_tokens, load.cached_tokens, load.generated_tokens) == (66, 32, 2)
    assert load.free_blocks + load.cached_blocks + load.used_blocks == 64
    outputs_of(engine)
    assert engine.load().decode_tokens_per_second == pytest.approx(20.0)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        make_engine().submit(request(0))


def test_what_cannot_meet_its_deadline_is_shed_before_it_costs_prefill() -> None:
    engine = make_engine()
    engine.submit(request(400, max_tokens=1))
    outputs_of(engine)
    hopeless = engine.submit(request(450, deadline=0.15, token=8))
    in_time = engine.submit(request(100, deadline=30.0))
    outputs = outputs_of(engine)
    assert [output.request_id for output in outputs if output.expired] == [hopeless]
    assert {output.request_id for output in outputs if output.token_ids} == {in_time}
    assert engine.load().prompt_tokens == 500, "the shed prompt was computed"


def test_a_prompt_is_not_shed_for_what_waits_behind_it() -> None:
    engine = make_engine(config={"max_num_seqs": 1})
    engine.submit(request(400, max_tokens=20))
    engine.step()
    engine.submit(request(300, deadline=3.0))
    for _ in range(9):
        engine.submit(request(450, max_tokens=1, priority=1))
    assert not [output for output in outputs_of(engine) if output.expired]


def starts_of(engine: Engine) -> list[int]:
    """The requests in the order of their first tokens."""
    return [output.request_id for output in outputs_of(engine) if output.token_offset == 0]


def test_a_better_priority_is_served_first_and_equals_in_order_of_arrival() -> None:
    engine = make_engine(config={"max_num_seqs": 1})
    for priority in (1, 0, -1, 0):
        engine.submit(request(priority=priority))
    assert starts_of(engine) == [2, 1, 3, 0]


@pytest.mark.parametrize(("waited_seconds", "order"), [(9.0, [1, 0]), (11.0, [0, 1])])
def test_waiting_makes_up_for_a_step_of_priority(waited_seconds: float, order: list[int]) -> None:
    clock = Clock()
    engine = make_engine(clock, config={"max_num_seqs": 1}, ageing_seconds=10.0)
    engine.submit(request(priority=1))
    clock.now += waited_seconds
    engine.submit(request(priority=0))
    assert starts_of(engine) == order


def test_a_long_prompt_takes_no_longer_beside_decodes_than_a_mixed_step_may() -> None:
    clock = Clock()
    engine = make_engine(clock, mixed_step_seconds=0.3)
    engine.submit(request(200, max_tokens=1))
    outputs_of(engine)
    decoding = engine.submit(request(33, max_tokens=40))
    engine.step()
    engine.submit(request(450, max_tokens=1))
    last, gaps = clock.now, []
    while engine.has_work:
        if any(output.request_id == decoding for output in engine.step().outputs):
            gaps.append(clock.now - last)
            last = clock.now
    assert 0.2 < max(gaps) < 0.45, "steps of 0.1 s, and 1000 tokens a second"


def test_many_decodes_get_no_longer_pauses_for_a_prompt_than_one_does() -> None:
    """All of a step's decodes take as long as one alone: what is measured with one must not be counted for each."""
    clock = Clock()
    engine = make_engine(clock, mixed_step_seconds=0.05)
    engine.submit(request(max_tokens=30))
    outputs_of(engine)
    for _ in range(8):
        engine.submit(request(max_tokens=200))
    for _ in range(3):
        engine.step()
    gaps: list[float] = []
    for token in (8, 9, 10):
        waiting = engine.submit(request(450, max_tokens=1, token=token))
        gaps.clear()
        is_computed = False
        while not is_computed:
            assert len(gaps) < 100, "the prompt is not computed"
            before = clock.now
            outputs = engine.step().outputs
            gaps.append(clock.now - before)
            is_computed = any(output.request_id == waiting for output in outputs)
    assert len(gaps) > 450 // 80, "steps of 0.1 s, and 0.05 for a prompt at 1000 tokens/s"
    assert max(gaps) < 0.18


class DecodesCost(SimulatedRunner):
    """A step takes the longer the more decodes it has, as with attention over long contexts."""

    def execute(self, plan: StepPlan) -> StepTokens:
        self._sleep(0.06 * sum(row.num_tokens == 1 for row in plan.rows))
        return super().execute(plan)


def test_prompts_are_not_starved_by_decodes_that_take_long_by_themselves() -> None:
    """16 decodes take 1.06 s, of which one alone tells nothing; prompts come without a gap between them."""
    engine = make_engine(runner=DecodesCost, num_blocks=600, mixed_step_seconds=0.1)
    engine.submit(request(max_tokens=30))
    outputs_of(engine)
    for _ in range(16):
        engine.submit(request(max_tokens=400))
    engine.step()
    for number in range(6):
        engine.submit(request(500, max_tokens=1, token=number + 20))
    steps = 0
    while engine.load().waiting or engine.load().queued_prefill_tokens:
        engine.step()
        steps += 1
        assert steps < 100, "of about 100 prompt tokens each, not of 16"
    assert steps > 25


def test_a_trial_that_was_forgotten_leaves_no_times_of_decodes() -> None:
    engine = make_engine(mixed_step_seconds=0.1)
    engine.submit(request(max_tokens=4))
    outputs_of(engine)
    times = lambda: engine.mixed_steps.decode_times.expected(1)  # noqa: E731
    assert times() == pytest.approx(0.1, rel=0.05)
    engine.forget_history(keeps_rates=True)
    assert times() > 0
    engine.forget_history(keeps_rates=False)
    assert times() == 0


def test_cancel_is_silent_and_harmless_twice() -> None:
    engine = make_engine()
    sequence_id = engine.submit(request())
    engine.step()
    engine.cancel(sequence_id)
    engine.cancel(sequence_id)
    assert outputs_of(engine) == []
    assert engine.pool.num_used == 0


def test_one_output_is_cancelled_and_a_second_cancel_of_it_leaves_the_others() -> None:
    engine = make_engine()
    request_id = engine.submit(request(max_tokens=9, n=2))
    assert engine.cancel(request_id, 1), "which cannot be ended alone before they fork"
    engine.step()
    assert engine.cancel(request_id, 1)
    assert engine.cancel(request_id, 1)
    outputs = outputs_of(engine)
    assert {output.index for output in outputs} == {0}
    assert [output.is_last for output in outputs] == [False] * 7 + [True]


def test_the_end_of_the_last_output_by_cancel_ends_the_request() -> None:
    engine = make_engine()
    request_id = engine.submit(request(max_tokens=9, n=2))
    engine.step()
    assert engine.cancel(request_id, 0)
    assert not engine.cancel(request_id, 1)
    assert outputs_of(engine) == []
    assert engine.pool.num_used == 0


def test_beams_are_cancelled_together_only() -> None:
    engine = make_engine()
    request_id = engine.submit(request(max_tokens=9, n=2, beam_width=3))
    engine.step()
    assert engine.cancel(request_id, 0)
    assert {output.index for output in outputs_of(engine)} == {0, 1}
    request_id = engine.submit(request(max_tokens=9, n=2, beam_width=3))
    engine.step()
    assert not engine.cancel(request_id)
    assert outputs_of(engine) == []
