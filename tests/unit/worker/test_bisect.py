"""A step that raises for some requests: only those fail, and all others get the tokens of an undisturbed run."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain
from blockyard.worker.engine import MAX_FAILURES_IN_A_ROW, Engine, EngineFailed
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.execution.bisect import MAX_FAILED_ALONE, NothingSucceeds, execute, together
from blockyard.worker.execution.runner import PendingStep, TorchRunner
from blockyard.worker.parallel.collective import RanksLost
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockId, BlockName, RequestId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import SequenceState
from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan, StepTokens

from .checkpoints import shared_checkpoint
from .scheduling import ROOT, make_sequence

MARKER = 66
BLOCK_SIZE = 16


class Raising:
    """A step that was begun, and then raises."""

    def result(self) -> StepTokens:
        raise RuntimeError("an illegal access")


class MarkerRaises(TorchRunner):
    """Raises for marked prompts after the whole step was computed and its draws were counted: the worst moment.
    Asynchronous errors of a device come then."""

    attempts: list[int]

    def start(self, plan: StepPlan) -> PendingStep:
        self.attempts.append(len(plan.rows))
        pending = super().start(plan)
        prompts = (row.sequence.tokens[: row.sequence.prompt_length] for row in plan.rows)
        return self.strike(pending) if any(MARKER in prompt for prompt in prompts) else pending

    def strike(self, pending: PendingStep) -> PendingStep:
        return Raising()


class MarkerRaisesAtOnce(MarkerRaises):
    """While the step before is in flight, where steps overlap."""

    def strike(self, pending: PendingStep) -> PendingStep:
        raise RuntimeError("out of memory")


class LosesARank(MarkerRaises):
    """Fails as if the process of another rank had ended, in a whole step or in a part of one."""

    fails_at = 1

    def start(self, plan: StepPlan) -> PendingStep:
        if len(self.attempts) + 1 >= self.fails_at:
            raise RanksLost("rank 1 is lost")
        return super().start(plan)


def make_engine(
    runner_class: type[MarkerRaises] = MarkerRaises,
    *,
    num_blocks: int = 48,
    host_blocks: int = 0,
    swap_blocks: int = 0,
    overlap: bool = False,
    budget: int = 2048,
) -> tuple[Engine, MarkerRaises]:
    runner = runner_class.create(
        shared_checkpoint("LlamaForCausalLM"),
        device="cpu",
        dtype="float32",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_host_slots=host_blocks + swap_blocks,
        verify_host_blocks=True,
    )
    assert isinstance(runner, MarkerRaises)
    runner.attempts = []
    config = SchedulerConfig(
        max_model_len=min(256, num_blocks * BLOCK_SIZE),
        max_num_seqs=32,
        max_num_batched_tokens=budget,
        block_size=BLOCK_SIZE,
        host_cache_blocks=host_blocks,
        swap_blocks=swap_blocks,
        preemption="swap" if swap_blocks else "recompute",
    )
    return Engine(config, runner, num_blocks=num_blocks, overlap_steps=overlap), runner


def request(tokens: list[int], **sampling: Any) -> EngineRequest:
    return EngineRequest(
        token_ids=tokens,
        prompt_length=len(tokens),
        names=[BlockName(name) for name in (ROOT, *chain(ROOT, tokens, BLOCK_SIZE))],
        sampling=SamplingParams(**{"max_tokens": 12, "seed": 3, **sampling}),
    )


def innocents() -> list[EngineRequest]:
    return [
        request([5] * 20),
        request([6] * 40, repetition_penalty=1.3, frequency_penalty=0.5),
        request([7] * 18, n=3),
        request([8] * 33, temperature=0.0, logprobs=2),
        request([9] * 25, beam_width=3, n=2),
        request([5] * 16 + [11] * 9),
    ]


Outputs = dict[RequestId, dict[int, list[int]]]


def run(
    engine: Engine, later: Sequence[EngineRequest] = (), after: int = 4
) -> tuple[Outputs, set[RequestId]]:
    """Return the tokens by request and output, and which requests failed. `later` comes after some steps."""
    tokens: Outputs = {}
    failed: set[RequestId] = set()
    steps = 0
    while engine.has_work or later:
        if steps == after:
            for submitted in later:
                engine.submit(submitted)
            later = ()
        steps += 1
        for output in engine.step().outputs:
            if output.state is SequenceState.FAILED:
                failed.add(output.request_id)
            tokens.setdefault(output.request_id, {}).setdefault(output.index, []).extend(output.token_ids)
        engine.scheduler.check_invariants()
    assert engine.pool.num_used == 0
    return tokens, failed


def marked(length: int = 30, **sampling: Any) -> EngineRequest:
    """Return a marked request. Each length has a first block of its own."""
    return request([length, MARKER] + [13] * (length - 2), **sampling)


@pytest.fixture(scope="module")
def undisturbed() -> Outputs:
    engine, _ = make_engine()
    for innocent in innocents():
        engine.submit(innocent)
    tokens, failed = run(engine)
    assert not failed
    return tokens


@pytest.mark.parametrize("num_poisons", [1, 2])
@pytest.mark.parametrize("host_blocks", [0, 16])
@pytest.mark.parametrize(
    ("runner_class", "overlap"), [(MarkerRaises, False), (MarkerRaises, True), (MarkerRaisesAtOnce, True)]
)
def test_those_beside_a_poison_get_the_tokens_of_an_undisturbed_run(
    undisturbed: Outputs,
    num_poisons: int,
    host_blocks: int,
    runner_class: type[MarkerRaises],
    overlap: bool,
) -> None:
    engine, runner = make_engine(runner_class, host_blocks=host_blocks, overlap=overlap)
    ids = [engine.submit(innocent) for innocent in innocents()]
    tokens, failed = run(engine, [marked(30 + number) for number in range(num_poisons)])
    assert failed == {RequestId(len(ids) + number) for number in range(num_poisons)}
    assert {key: tokens[key] for key in ids} == undisturbed
    assert len(runner.attempts) > len(ids)


class RaisesAtFirst(MarkerRaises):
    """Every step of several requests raises after it was computed, and in parts it does not."""

    raises_each = 1
    seen: frozenset[int] = frozenset()

    def start(self, plan: StepPlan) -> PendingStep:
        pending = super().start(plan)
        is_new, self.seen = plan.step not in self.seen, self.seen | {plan.step}
        is_in_turn = is_new and plan.step % self.raises_each == 0
        has_parts = len({row.sequence.request_id for row in plan.rows}) > 1
        return Raising() if is_in_turn and has_parts else pending


class RaisesAtTimes(RaisesAtFirst):
    """Every third, so that of steps that overlap not all are taken back."""

    raises_each = 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_in_parts_is_the_same_step(overlap: bool) -> None:
    """Under pressure: what goes to host memory goes once, before its blocks are written anew; draws count once."""
    results, swaps = [], []
    for runner_class in (MarkerRaises, RaisesAtTimes if overlap else RaisesAtFirst):
        engine, _ = make_engine(runner_class, num_blocks=14, host_blocks=32, swap_blocks=32, overlap=overlap)
        for number in range(4):
            penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.5} if number % 2 else {"n": 2}
            engine.submit(request([20 + number] * 40, max_tokens=40, **penalties))
        results.append(run(engine))
        # Who is taken back waits until there is room, and need not be swapped out; then the host cache moves blocks.
        swaps.append(engine.load().host_cached_blocks if overlap else engine.scheduler.num_swaps)
    assert results[0] == results[1]
    assert not results[0][1]
    assert min(swaps) > 0


def test_who_reads_what_the_poison_computes_in_that_step_ends_with_it() -> None:
    """It would read blocks that were never filled."""
    engine, _ = make_engine()
    first = engine.submit(request([3] * 32 + [MARKER] * 4))
    sharing = engine.submit(request([3] * 32 + [4] * 4))
    alone = engine.submit(request([5] * 36))
    tokens, failed = run(engine)
    assert failed == {first, sharing}
    assert len(tokens[alone][0]) == 12
    again = engine.submit(request([3] * 32 + [4] * 4))
    reference, _ = make_engine()
    expected = reference.submit(request([3] * 32 + [4] * 4))
    assert run(engine)[0][again] == run(reference)[0][expected]


def test_poisons_one_after_the_other_end_no_engine_where_others_succeed_between() -> None:
    engine, _ = make_engine()
    for number in range(MAX_FAILURES_IN_A_ROW + 3):
        engine.submit(marked(20 + number))
        run(engine)
        if number % 3 == 2:
            engine.submit(request([5] * 20, max_tokens=2))
            assert not run(engine)[1]


def test_an_engine_for_which_nothing_succeeds_ends() -> None:
    engine, runner = make_engine()
    for number in range(20):
        engine.submit(marked(20 + number))
    engine.step()
    # Not each of twenty alone: what fails three times alone fails for all.
    assert len(runner.attempts) < 12
    for number in range(20):
        engine.submit(marked(50 + number))
    for _ in range(2):
        engine.step()
    with pytest.raises(EngineFailed, match="9 requests in a row have failed"):
        engine.step()


@pytest.mark.fault(72)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_the_loss_of_a_rank_ends_the_engine_and_no_request_is_told_that_it_failed(
    overlap: bool, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers replay what had no answer."""
    monkeypatch.setattr(LosesARank, "fails_at", fails_at)
    engine, _ = make_engine(LosesARank, overlap=overlap)
    for one in (*innocents(), marked()):
        engine.submit(one)

    def step_on() -> None:
        while engine.has_work:
            assert all(output.state is not SequenceState.FAILED for output in engine.step().outputs)

    with pytest.raises(RanksLost):
        step_on()


class Raises:
    """A runner that raises for some sequences; tokens are sequence ids."""

    def __init__(self, raises_for: Callable[[int], bool]) -> None:
        self._raises_for = raises_for
        self.parts: list[list[int]] = []

    def execute(self, plan: StepPlan) -> StepTokens:
        ids = [int(row.sequence.sequence_id) for row in plan.rows]
        self.parts.append(ids)
        if not ids or any(map(self._raises_for, ids)):
            raise RuntimeError
        return StepTokens(tokens=ids)

    def warm_up(self) -> None:
        """Nothing to warm."""


def rows(*blocks: list[int], requests: Sequence[int] | None = None) -> tuple[ScheduledRow, ...]:
    made = []
    for number, table in enumerate(blocks):
        sequence = make_sequence(number, [1] * 4)
        sequence.request_id = RequestId(number if requests is None else requests[number])
        sequence.block_table.assign(map(BlockId, table))
        made.append(ScheduledRow(sequence=sequence, start=0, num_tokens=4, samples=True))
    return tuple(made)


def test_rows_of_a_request_and_rows_that_share_a_block_being_filled_stay_together() -> None:
    filled = {7, 8, 9}
    made = rows([1, 7], [2], [1], [7, 8], [3], [8, 9], [4], requests=[0, 1, 2, 3, 4, 5, 1])
    assert together(made, filled.__contains__) == [[0, 3, 5], [1, 6], [2], [4]]
    joining_late = rows([7], [8], [7, 8], [5])
    assert together(joining_late, filled.__contains__) == [[0, 1, 2], [3]]


@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_every_failing_request_is_found(size: int) -> None:
    plan = StepPlan(step=1, rows=rows(*([number] for number in range(size))))
    for poison in range(size):
        runner = Raises(lambda number, poison=poison: number == poison)  # type: ignore[misc]
        tokens = execute(runner, plan, lambda block: False).tokens
        assert tokens == [-2 if number == poison else number for number in range(size)]
        assert len(runner.parts) <= 2 * size.bit_length() + 1


def test_a_step_of_which_nothing_succeeds_is_given_up_early() -> None:
    runner = Raises(lambda number: True)
    plan = StepPlan(step=1, rows=rows(*([number] for number in range(64))))
    with pytest.raises(NothingSucceeds) as caught:
        execute(runner, plan, lambda block: False)
    assert caught.value.num_failed_alone == MAX_FAILED_ALONE
    assert len(runner.parts) < 16


def test_a_step_that_only_moves_blocks_fails_as_a_whole() -> None:
    plan = StepPlan(step=1, rows=(), copies=((BlockId(0), BlockId(1)),))
    with pytest.raises(NothingSucceeds):
        execute(Raises(lambda number: True), plan, lambda block: False)
