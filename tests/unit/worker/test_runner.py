"""A step's work beside the model: block moves before it, grammar masks, and the state that it keeps."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from pathlib import Path

import pytest
import torch
from blockyard.kernels.torch.nucleus import NucleusSearch, thresholds_by_sorting
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import BlockId, HostSlot, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan, StepTokens

from .checkpoints import reference_greedy, shared_checkpoint

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
BLOCK_SIZE = 16
TOKENS = list(range(5, 38))
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def runner() -> TorchRunner:
    runner = TorchRunner.create(
        shared_checkpoint("LlamaForCausalLM"),
        device="cpu",
        dtype="float32",
        num_blocks=16,
        block_size=BLOCK_SIZE,
        num_host_slots=4,
    )
    for pool in runner.kv_pools:
        pool.fill_(float("nan"))
    return runner


def make_row(blocks: list[int], *, start: int = 0, sampling: SamplingParams = GREEDY) -> ScheduledRow:
    sequence = Sequence(
        sequence_id=SequenceId(blocks[-1]),
        tokens=token_array(TOKENS),
        prompt_length=len(TOKENS),
        sampling=sampling,
        names=[],
        block_table=BlockTable(map(BlockId, blocks)),
    )
    return ScheduledRow(sequence=sequence, start=start, num_tokens=len(TOKENS) - start, samples=True)


def expected_token() -> int:
    return reference_greedy(shared_checkpoint("LlamaForCausalLM"), tuple(TOKENS), 1).tokens[0]


def test_copies_are_done_before_the_step_reads_them_or_without_a_step(runner: TorchRunner) -> None:
    runner.execute(StepPlan(step=0, rows=(make_row([0, 1, 2]),)))
    copies = ((BlockId(0), BlockId(7)), (BlockId(1), BlockId(9)))
    reader = make_row([7, 9, 3], start=32)
    assert runner.execute(StepPlan(step=1, rows=(reader,), copies=copies)).tokens == [expected_token()]
    only = ((BlockId(0), BlockId(8)),)
    assert runner.execute(StepPlan(step=2, rows=(), copies=only)) == StepTokens(tokens=[])
    for pool in runner.kv_pools:
        assert torch.equal(pool[[0, 1, 0]], pool[[7, 9, 8]])


def test_a_block_saved_to_the_host_may_be_filled_again_and_copied_in_one_step(runner: TorchRunner) -> None:
    runner.execute(StepPlan(step=0, rows=(make_row([0, 1, 2]),)))
    there = ((BlockId(0), HostSlot(3)), (BlockId(1), HostSlot(0)))
    runner.execute(StepPlan(step=1, rows=(), to_host=there))
    overwritten = make_row([0, 1, 5])
    overwritten.sequence.tokens.reverse()
    runner.execute(StepPlan(step=2, rows=(overwritten,)))
    saved = [pool[[0, 1]].clone() for pool in runner.kv_pools]
    moved = StepPlan(
        step=3,
        rows=(make_row([8, 9, 3], start=32), make_row([0, 1, 5], start=32)),
        to_host=((BlockId(0), HostSlot(1)), (BlockId(1), HostSlot(2))),
        from_host=((HostSlot(3), BlockId(0)), (HostSlot(0), BlockId(1))),
        copies=((BlockId(0), BlockId(8)), (BlockId(1), BlockId(9))),
    )
    assert runner.execute(moved).tokens == [expected_token()] * 2
    back = ((HostSlot(1), BlockId(10)), (HostSlot(2), BlockId(11)))
    runner.execute(StepPlan(step=4, rows=(), from_host=back))
    assert all(
        torch.equal(pool[[10, 11]], blocks) for pool, blocks in zip(runner.kv_pools, saved, strict=True)
    )


class OnlyToken:
    """Implements `GrammarMasks`: every sequence with a grammar may have one token, the grammar itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []

    def start(self, rows: Items[ScheduledRow]) -> None:
        self.calls.append(("start", [row.sequence.sequence_id for row in rows]))

    def apply(self, logits_SV: torch.Tensor, rows: Items[ScheduledRow]) -> None:
        self.calls.append(("apply", [row.sequence.sequence_id for row in rows]))
        for row, logits_V in zip(rows, logits_SV, strict=True):
            if isinstance(row.sequence.grammar, int):
                kept = logits_V[row.sequence.grammar].clone()
                logits_V.fill_(float("-inf"))[row.sequence.grammar] = kept

    def forget(self, ended: Iterable[SequenceId]) -> None:
        self.calls.append(("forget", list(ended)))


def test_grammar_masks_rule_the_choice_and_not_the_logprobs(runner: TorchRunner) -> None:
    runner.grammar_masks = masks = OnlyToken()
    free, chunk, masked = (
        make_row(blocks, sampling=SamplingParams(temperature=1.0, seed=4, logprobs=1))
        for blocks in ([0, 1, 2], [3, 4, 5], [6, 7, 8])
    )
    masked.sequence.grammar = 77
    chunk = ScheduledRow(sequence=chunk.sequence, start=0, num_tokens=9, samples=False)
    plan = StepPlan(step=0, rows=(free, chunk, masked), ended=(SequenceId(99),))
    result = runner.execute(plan)
    assert masks.calls == [("forget", [99]), ("start", [2, 8]), ("apply", [2, 8])]
    assert result.tokens[2] == 77
    logprobs = result.extras[2].logprobs[0]
    assert logprobs.token_id == 77
    assert logprobs.rank > 1
    assert logprobs.logprob < -1
    masked.sequence.grammar = None
    assert runner.execute(plan).tokens[0] == result.tokens[0]
    assert [name for name, _ in masks.calls[3:]] == ["forget"]


def test_what_a_sequence_left_goes_when_it_ends_even_in_a_step_without_work(runner: TorchRunner) -> None:
    runner.warm_up()
    assert len(runner._sampler.state) == 0
    assert not runner._newest
    row = make_row([0, 1, 2], sampling=SamplingParams(frequency_penalty=1.0, bad_token_ids=frozenset({1})))
    runner.execute(StepPlan(step=0, rows=(row,)))
    assert len(runner._sampler.state) == 1
    runner.execute(StepPlan(step=1, rows=(), ended=(row.sequence.sequence_id,)))
    assert len(runner._sampler.state) == runner._sampler.state.counts.num_used == 0


def test_warm_up_settles_a_nucleus_so_that_no_request_waits_for_its_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a vocabulary in which one may be wide."""
    runner = TorchRunner.create(DEMO, device="cpu", dtype="float32", num_blocks=8, block_size=BLOCK_SIZE)
    settled: list[torch.Size] = []

    def find_thresholds(weights_FV: torch.Tensor, *others: torch.Tensor) -> None:
        settled.append(weights_FV.shape)
        thresholds_by_sorting(weights_FV, *others)

    monkeypatch.setattr(runner._sampler, "_nuclei", NucleusSearch(find=find_thresholds))
    runner.warm_up()
    assert settled == [(2, runner.config.vocab_size)]
