"""A draft model changes no token, computes nothing twice, is refused where it does not fit, and may fail."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockyard.worker.config import EngineConfig
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, StepPlan, StepTokens
from blockyard.worker.speculation.draft_model import (
    CATCH_UP_SHARE,
    MAX_FAILURES,
    SHORT_LAG_TOKENS,
    DraftModel,
)
from blockyard.worker.speculation.row_times import RowTimes
from blockyard.worker.speculation.speculation import TRIAL_STEPS, Speculation
from blockyard.worker.unsupported import UnsupportedModelError

from .checkpoints import make_embedding_checkpoint, shared_checkpoint
from .drafting import CheckedKeys, Whole, always, drafted_engine, model_of, run_kinds
from .scheduling import make_sequence
from .spoiling import change_config, copy_of
from .token_engines import BLOCK_SIZE, outputs_of, prompt_of, submit


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return shared_checkpoint("Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Whole:
    return run_kinds(drafted_engine(checkpoint))


def test_a_prefix_whose_keys_it_has_is_not_computed_again(checkpoint: Path) -> None:
    engine = drafted_engine(checkpoint, checkpoint)
    _, keys = always(engine)
    prompt = prompt_of(8 * BLOCK_SIZE)
    computed = []
    for _ in range(2):
        before = keys.num_computed
        submit(engine, prompt, 12)
        outputs_of(engine)
        computed.append(keys.num_computed - before)
    assert computed[0] > 8 * BLOCK_SIZE
    assert computed[1] < 4 * BLOCK_SIZE
    engine.flush()
    # Whoever fills the blocks next with other tokens finds none of them.
    submit(engine, prompt_of(8 * BLOCK_SIZE, seed=1), 12)
    outputs_of(engine)
    assert keys.num_computed > sum(computed) + 8 * BLOCK_SIZE


def test_the_setting_alone_makes_it_guess(checkpoint: Path) -> None:
    plain, drafted = drafted_engine(checkpoint), drafted_engine(checkpoint, checkpoint)
    # It is as slow as the served model, so by its measured time nothing would be tried.
    model_of(drafted)._times = RowTimes()
    expected = run_kinds(plain)
    # On a busy machine the measured steps may let it guess nothing for some time.
    for _ in range(20):
        assert run_kinds(drafted) == expected
        if drafted.load().drafted_tokens:
            break
    assert model_of(drafted).num_failures == 0
    assert drafted.load().drafted_tokens > 0


@pytest.mark.parametrize("is_raised", [True, False])
def test_one_that_fails_costs_no_request_and_is_given_up(
    checkpoint: Path, expected: Whole, caplog: pytest.LogCaptureFixture, is_raised: bool
) -> None:
    def fail(plan: StepPlan) -> StepTokens:
        if is_raised:
            raise RuntimeError("out of memory")
        return StepTokens(tokens=[FAILED_TOKEN] * len(plan.rows))

    engine = drafted_engine(checkpoint, checkpoint)
    speculation, _ = always(engine)
    model_of(engine)._execute = fail
    with caplog.at_level(logging.ERROR):
        assert run_kinds(engine) == expected
    assert model_of(engine).num_failures == MAX_FAILURES
    assert speculation.num_drafted == 0
    assert [record.message for record in caplog.records] == [
        "the draft model failed: steps go on without its drafts",
        f"the draft model failed {MAX_FAILURES} times: it is not used any more",
    ]


def test_one_failure_is_not_the_end(checkpoint: Path, expected: Whole) -> None:
    engine = drafted_engine(checkpoint, checkpoint)
    speculation, keys = always(engine)
    execute, calls = keys.execute, iter(range(10**6))

    def fail_at_fifth(plan: StepPlan) -> StepTokens:
        found = execute(plan)
        if next(calls) == 5:
            raise RuntimeError("lost")
        return found

    model_of(engine)._execute = fail_at_fifth
    assert run_kinds(engine) == expected
    assert model_of(engine).num_failures == 1
    assert speculation.num_right > 100


def test_one_that_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    larger = shared_checkpoint("LlamaForCausalLM", vocab_size=280)
    embedding = make_embedding_checkpoint(tmp_path / "embedding", "Qwen3ForCausalLM", is_bare=False)
    unknown = change_config(copy_of(checkpoint, tmp_path / "unknown"), architectures=["MambaForCausalLM"])
    refused: list[tuple[Path, Path, type[Exception], str]] = [
        (checkpoint, larger, ValueError, r"has a vocabulary of 280 tokens, .* one of 272: .* not known"),
        (checkpoint, embedding, UnsupportedModelError, "not one that embeds"),
        (embedding, checkpoint, ValueError, "the served model embeds"),
        (checkpoint, unknown, UnsupportedModelError, "MambaForCausalLM"),
    ]
    for served, draft_model, error, why in refused:
        with pytest.raises(error, match=why):
            drafted_engine(served, draft_model)
    with pytest.raises(ValueError, match="a simulated engine computes none"):
        EngineConfig(model="a", draft_model="b", engine="simulated")
    with pytest.raises(ValueError, match="a worker of one rank"):
        EngineConfig(model="a", draft_model="b", tensor_parallel_size=2)


class Timed:
    """A draft model's steps on a clock that they alone move."""

    def __init__(self, pass_seconds: float) -> None:
        self.now = 0.0
        self.pass_seconds = pass_seconds
        self.keys = CheckedKeys(BLOCK_SIZE)

    def __call__(self) -> float:
        return self.now

    def execute(self, plan: StepPlan) -> StepTokens:
        self.now += self.pass_seconds * (1 + plan.num_tokens // 64)
        return self.keys.execute(plan)

    def model(self) -> DraftModel:
        return DraftModel(
            self.execute,
            num_blocks=256,
            block_size=BLOCK_SIZE,
            max_tokens=4096,
            max_step_tokens=512,
            clock=self,
        )


def steps(speculation: Speculation, clock: Timed, *, num_steps: int, step_seconds: float) -> Iterator[int]:
    """Yield the number of drafts of each step of one sequence. All drafts are right."""
    sequence = make_sequence(0, [7, 8, 9], max_tokens=3000)
    sequence.tokens.append(1)
    for _ in range(num_steps):
        sequence.block_table.extend(range(len(sequence.block_table), -(-len(sequence.tokens) // BLOCK_SIZE)))
        began = clock.now
        proposed = (
            speculation.propose([(sequence, 15)], num_rows=1, most=15) if speculation.may_draft(1) else []
        )
        drafts = [token for _, tokens in proposed for token in tokens]
        waited = clock.now - began
        clock.now += step_seconds
        if drafts:
            speculation.note(sequence, num_drafted=len(drafts), num_right=len(drafts))
        # The step takes as long with drafts as without them.
        speculation.observe(1, len(drafts), step_seconds, waited_seconds=waited)
        sequence.tokens.extend([*drafts, 5000 + len(sequence.tokens)])
        yield len(drafts)


@pytest.mark.parametrize(("pass_seconds", "gains"), [(0.05, True), (0.97, False), (1.5, False)])
def test_it_guesses_only_where_its_own_time_leaves_a_gain(pass_seconds: float, gains: bool) -> None:
    clock, num_steps = Timed(pass_seconds), 200 if gains else 600
    speculation = Speculation(model=clock.model())
    counts = list(steps(speculation, clock, num_steps=num_steps, step_seconds=1.0))
    rate = (num_steps + sum(counts)) / clock.now
    if gains:
        assert rate > 2.5
    else:
        assert rate > 0.98
        # A trial now and then.
        assert sum(count > 0 for count in counts) < num_steps / TRIAL_STEPS + 10


def caught_up_share(gain_seconds: float) -> float:
    """Return the share of the time that catching up takes, where sequences often come back in other blocks."""
    clock = Timed(0.01)
    model = clock.model()
    sequences = [make_sequence(number, [number, *range(400)], max_tokens=99) for number in range(8)]
    blocks = iter(range(256))
    for sequence in sequences:
        sequence.block_table.extend(next(blocks) for _ in range(26))
    spent, spent_early, began = 0.0, 0.0, 0.0
    for turn in range(20_000):
        clock.now += 0.01
        sequence = sequences[turn % 8]
        if turn % 40 < 8:
            # As after a preemption.
            sequence.block_table.assign([*sequence.block_table[1:], sequence.block_table[0]])
        if count := model.most(sequence, 3):
            model.complete([(sequence, [-1] * count)])
            model.earn(gain_seconds)
        spent += model.take_seconds()[1]
        if turn == 10_000:
            # What an engine starts with is spent.
            spent_early, began = spent, clock.now
    return (spent - spent_early) / (clock.now - began)


def test_catching_up_takes_a_small_share_of_the_time_and_more_where_drafts_gain() -> None:
    without_gain, with_gain = caught_up_share(0.0), caught_up_share(0.02)
    assert 0.6 * CATCH_UP_SHARE < without_gain < 1.2 * CATCH_UP_SHARE
    assert with_gain > 5 * without_gain


def test_the_time_of_a_pass_is_known_before_the_first_guess() -> None:
    clock = Timed(0.01)
    model = clock.model()
    assert model.seconds(1, 3) == 0.0
    model.measure(24)
    assert model.seconds(1, 3) == pytest.approx(0.03)
    assert model.seconds(24, 3) == pytest.approx(0.03)
    assert model._held == {}
    assert model._full == {}


def test_a_prompt_longer_than_a_step_is_caught_up_in_parts() -> None:
    clock = Timed(0.001)
    model = clock.model()
    sequence = make_sequence(0, range(1500), max_tokens=99)
    sequence.block_table.extend(range(94))
    made = [model.complete([(sequence, [-1] * 4)]) for _ in range(5)]
    # First a few tokens, whose time tells how many a call may have.
    assert [len(found) for found in made] == [0, 0, 0, 1, 1]
    assert clock.keys.num_computed < 1500 + SHORT_LAG_TOKENS


def test_it_guesses_nothing_beyond_its_longest_context() -> None:
    model = Timed(0.001).model()
    sequence = make_sequence(0, range(4090), max_tokens=99)
    assert model.most(sequence, 15) == 6
    sequence.tokens.extend(range(9))
    assert model.most(sequence, 15) == 0
