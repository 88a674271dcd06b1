"""Overlapping steps give the same tokens as steps one at a time, after any end, preemption, failure or cancellation."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest, SequenceOutput
from blockyard.worker.execution.runner import PendingStep, TorchRunner
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.sequences.sequence import FinishReason, SequenceState
from blockyard.worker.sequences.step_plan import StepPlan, StepTokens
from blockyard.worker.simulated.runner import SimulatedRunner

from tests.unit.worker.checkpoints import shared_checkpoint
from tests.unit.worker.scheduling import ROOT
from tests.unit.worker.steps import DEVICE
from tests.unit.worker.token_engines import BLOCK_SIZE, outputs_of, request_of, tokens_of

MARKER = 66


def request(tokens: list[int], **sampling: Any) -> EngineRequest:
    """Return a request that draws its tokens."""
    return request_of(tokens, **({"max_tokens": 12, "seed": len(tokens), "temperature": 1.0} | sampling))


class Noted(SimulatedRunner):
    """Notes what is asked of it, and when."""

    def __init__(self) -> None:
        super().__init__(vocab_size=64, prefill_tokens_per_second=1e6, step_seconds=0.0, sleep=lambda _: None)
        self.notes: list[tuple[str, int]] = []

    def start(self, plan: StepPlan) -> PendingStep:
        self.notes.append(("start", plan.step))
        return super().start(plan)

    def execute(self, plan: StepPlan) -> StepTokens:
        self.notes.append(("compute", plan.step))
        return super().execute(plan)


def noted(request: EngineRequest, **config: Any) -> tuple[list[tuple[str, int]], list[SequenceOutput]]:
    """Return what a runner was asked for one request, and the outputs."""
    runner = Noted()
    settings = SchedulerConfig(max_model_len=512, max_num_seqs=8, **config)
    engine = Engine(settings, runner, num_blocks=64, overlap_steps=True)
    engine.submit(request)
    return runner.notes, [output for outputs in outputs_of(engine).values() for output in outputs]


def test_each_step_is_started_before_the_one_before_it_is_waited_for() -> None:
    notes, outputs = noted(request([5] * 20, max_tokens=3))
    assert [output.token_offset for output in outputs] == [0, 1, 2]
    steps = "start 0, start 1, compute 0, start 2, compute 1, compute 2"
    assert ", ".join(f"{what} {step}" for what, step in notes) == steps


def test_one_step_at_a_time_is_the_default_and_brings_its_tokens_at_once() -> None:
    runner = Noted()
    engine = Engine(SchedulerConfig(max_model_len=512), runner, num_blocks=64)
    engine.submit(request([5] * 20, max_tokens=4))
    assert engine.step().outputs[0].token_offset == 0
    assert runner.notes == [("compute", 0)]


@pytest.mark.parametrize(
    "sampling", [{"beam_width": 2, "n": 2}, {"n": 3}, {"logprobs": 1}, {"prompt_logprobs": 1}]
)
def test_a_step_that_waits_for_the_host_is_never_in_flight(sampling: dict[str, Any]) -> None:
    notes, _ = noted(request([5] * 40, max_tokens=1, **sampling), max_num_batched_tokens=16)
    last = max(step for _, step in notes)
    assert [note for note in notes if note[1] == last] == [("compute", last)]


@pytest.mark.parametrize(
    "sampling", [{"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}]
)
def test_filters_do_overlap(sampling: dict[str, Any]) -> None:
    notes, _ = noted(request([5] * 20, max_tokens=3, **sampling))
    assert notes[:3] == [("start", 0), ("start", 1), ("compute", 0)]


def torch_engine(
    runner_class: type[TorchRunner] = TorchRunner,
    *,
    overlap: bool = True,
    num_blocks: int = 64,
    **config: Any,
) -> Engine:
    settings = {"max_model_len": min(256, num_blocks * BLOCK_SIZE), "max_num_seqs": 16} | config
    runner = runner_class.create(
        shared_checkpoint("LlamaForCausalLM"),
        device=DEVICE,
        dtype="float32",
        deterministic=DEVICE.type == "cpu",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_host_slots=settings.get("swap_blocks", 0) + settings.get("host_cache_blocks", 0),
    )
    return Engine(SchedulerConfig(**settings), runner, num_blocks=num_blocks, overlap_steps=overlap)


def served(engine: Engine, requests: Sequence[EngineRequest]) -> list[tuple[Any, ...]]:
    """Return the tokens, the end and the reports of each output."""
    for each in requests:
        engine.submit(each)
    return [
        (
            key,
            tokens_of(outputs),
            [(o.state, o.finish_reason, o.stop_token) for o in outputs if o.finish_reason or not o.token_ids],
            [token.token_id for o in outputs for token in (*o.logprobs, *o.prompt_logprobs)],
        )
        for key, outputs in sorted(outputs_of(engine).items())
    ]


def test_what_is_computed_after_a_stop_is_dropped_and_its_blocks_return_after_it() -> None:
    """It would fill a block: no name of it is published."""
    prompt = [5] * (2 * BLOCK_SIZE - 3)
    greedy = torch_engine(overlap=False)
    greedy.submit(request(prompt, temperature=0.0))
    tokens = tokens_of(next(iter(outputs_of(greedy).values())))
    stop = next(index for index in range(1, len(tokens)) if tokens[index] not in tokens[:index])
    prompt = [*prompt, *tokens[: stop - 1]]
    engine = torch_engine()
    engine.submit(request(prompt, temperature=0.0, stop_token_ids=frozenset({tokens[stop]})))
    outputs: list[SequenceOutput] = []
    published: set[BlockName] = set()
    while engine.has_work:
        result = engine.step()
        outputs += result.outputs
        published.update(result.changes.stored)
        is_over = bool(outputs) and outputs[-1].finish_reason is FinishReason.STOP
        assert (engine.pool.num_used > 0) is (not is_over or engine.has_work)
        engine.scheduler.check_invariants()
    expected = tokens[stop - 1 : stop + 1]
    assert tokens_of(outputs) == expected
    assert published == set(map(BlockName, chain(ROOT, prompt + expected, BLOCK_SIZE)))


def crowd() -> list[EngineRequest]:
    """Return requests of every kind. Some of them wait for the host, and others do not."""
    chance = random.Random(3)
    shared = [chance.randrange(3, 270) for _ in range(40)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"max_tokens": 30},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "max_tokens": 25},
        {"n": 3},
        {"beam_width": 3, "n": 2},
        {"logprobs": 2, "max_tokens": 5},
        {"prompt_logprobs": 1},
        {"top_k": 5, "min_tokens": 4, "stop_token_ids": frozenset(range(100))},
        {"top_p": 0.8},
        {"stop_token_ids": frozenset(range(3, 150)), "max_tokens": 40},
        {"max_tokens": 1},
        {"allowed_token_ids": frozenset({5}), "bad_token_ids": frozenset({5})},
    ]
    return [
        request([*shared[: chance.choice([0, 20, 40])], *[20 + index] * chance.randint(5, 60)], **kind)
        for index, kind in enumerate(kinds * 2)
    ]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "config",
    [
        {"num_blocks": 400},
        {"num_blocks": 20, "max_num_batched_tokens": 24, "preemption": "recompute"},
        {"num_blocks": 17, "swap_blocks": 30, "host_cache_blocks": 10, "preemption": "swap"},
    ],
    ids=["room for all", "chunks and preemption", "swaps and a host cache"],
)
def test_a_crowd_gets_the_tokens_of_steps_one_at_a_time(config: dict[str, Any]) -> None:
    results = []
    for overlap in (False, True):
        engine = torch_engine(overlap=overlap, **config)
        results.append(served(engine, crowd()))
        assert (engine.scheduler.num_preemptions > 0) == ("preemption" in config)
        assert (engine.scheduler.num_swaps > 0) == ("swap_blocks" in config)
    assert results[0] == results[1]


class SpoilsMarked(TorchRunner):
    """Write NaN to the first block of a marked prompt once it decodes, as if a bit had flipped there."""

    def start(self, plan: StepPlan) -> PendingStep:
        for row in plan.rows:
            if MARKER in row.sequence.tokens[: row.sequence.prompt_length] and row.num_tokens == 1:
                for pool in self.kv_pools:
                    pool[row.sequence.block_table[0]] = float("nan")
        return super().start(plan)


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    requests = [request([20 + index] * 30) for index in range(4)]
    requests += [request([MARKER] * 40), request([70] * 18, n=2)]
    apart, overlapping = (
        served(torch_engine(SpoilsMarked, overlap=overlap), requests) for overlap in (False, True)
    )
    assert apart == overlapping
    assert (SequenceState.FAILED, None, None) in overlapping[4][2]


def test_a_cancel_while_a_step_is_in_flight_ends_the_request_and_frees_its_blocks_within_a_step() -> None:
    engine = torch_engine()
    staying, leaving = engine.submit(request([5] * 20)), engine.submit(request([6] * 40, max_tokens=100))
    for _ in range(3):
        engine.step()
    engine.cancel(leaving)
    held = engine.pool.num_used
    engine.step()
    engine.scheduler.check_invariants()
    assert engine.pool.num_used < held
    alone = torch_engine(overlap=False)
    alone.submit(request([5] * 20))
    expected = tokens_of(outputs_of(alone)[RequestId(0), 0])
    got = outputs_of(engine)
    assert got.keys() == {(staying, 0)}
    rest = [token for output in got[staying, 0] for token in output.token_ids]
    assert rest == expected[-len(rest) :]
