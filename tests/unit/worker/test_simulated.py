"""The simulated runner: a step gives results as exact as a model's, and known in advance."""

import math
from collections.abc import Iterable, Sequence

import pytest
import torch
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.step_plan import NO_TOKEN, ScheduledRow, StepPlan, StepTokens
from blockyard.worker.simulated.grammars import SimulatedGrammars
from blockyard.worker.simulated.runner import SimulatedRunner

from .sampling import Draw, make_row

VOCAB_SIZE = 100


class Even:
    """Masks that let even tokens come, and none after the vocabulary's middle."""

    def __init__(self) -> None:
        self.forgotten: list[SequenceId] = []

    def start(self, rows: Sequence[ScheduledRow]) -> None:
        assert all(row.sequence.grammar for row in rows)

    def apply(self, logits_SV: torch.Tensor, rows: Sequence[ScheduledRow]) -> None:
        logits_SV[:, 1::2] = -math.inf
        logits_SV[:, VOCAB_SIZE // 2 :] = -math.inf

    def forget(self, ended: Iterable[SequenceId]) -> None:
        self.forgotten += ended


def execute(*rows: ScheduledRow, masks: Even | None = None) -> StepTokens:
    runner = SimulatedRunner(
        vocab_size=VOCAB_SIZE, prefill_tokens_per_second=1e9, step_seconds=0.0, sleep=lambda seconds: None
    )
    if masks is not None:
        runner.grammars = SimulatedGrammars(masks, VOCAB_SIZE)
    return runner.execute(StepPlan(step=0, rows=rows, ended=(SequenceId(7),)))


def test_tokens_of_seed_and_position_never_change_and_under_a_grammar_the_next_one_comes_that_may() -> None:
    """Other workers, perhaps of another version, continue the same request."""
    rows = [
        make_row(Draw(SamplingParams(seed=seed), position, 0), seed)
        for seed, position in ((0, 5), (1, 5), (-7, 900))
    ]
    assert execute(*rows) == StepTokens(tokens=[84, 49, 35])
    rows[0].sequence.grammar = rows[1].sequence.grammar = "even"
    masks = Even()
    assert execute(*rows, masks=masks) == StepTokens(tokens=[0, 0, 35])
    assert masks.forgotten == [SequenceId(7)]


def test_outputs_of_a_fork_are_those_of_their_index() -> None:
    forking = make_row(Draw(SamplingParams(n=4, logprobs=2, seed=9), 6, 0), 0)
    result = execute(forking)
    alone = [execute(make_row(Draw(SamplingParams(seed=9), 6, 0), 0, index=i)).tokens[0] for i in range(4)]
    assert [*result.tokens, *result.extras[0].tokens] == alone
    assert len(set(alone)) == 4
    logprobs = result.extras[0].logprobs
    assert [reported.token_id for reported in logprobs] == alone
    assert all(reported.logprob == -math.log(VOCAB_SIZE) for reported in logprobs)
    assert all(reported.rank == 1 and len(reported.top) == 2 for reported in logprobs)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 9, 10])
def test_prompt_logprobs_cover_the_prompt_from_its_second_token(chunk_tokens: int) -> None:
    tokens = list(range(50, 60))
    sequence = make_row(Draw(SamplingParams(prompt_logprobs=1), 10, 0), 0, tokens).sequence
    reported: list[int] = []
    for start in range(0, 10, chunk_tokens):
        end = min(start + chunk_tokens, 10)
        result = execute(ScheduledRow(sequence, start, end - start, samples=end == 10))
        assert (result.tokens[0] == NO_TOKEN) == (end < 10)
        extras = result.extras.get(0)
        reported += [] if extras is None else [r.token_id for r in extras.prompt_logprobs]
    assert reported == tokens[1:]


def test_a_beams_candidates_are_distinct_and_in_order() -> None:
    beam = SamplingParams(beam_width=4, eos_token_ids=frozenset({1}))
    result = execute(make_row(Draw(beam, 6, 0), 0), make_row(Draw(beam, 6, 0), 1, index=2))
    tokens, logprobs = zip(*result.extras[0].candidates, strict=True)
    assert len(set(tokens)) == len(tokens) == 5
    assert list(logprobs) == sorted(logprobs, reverse=True)
    assert result.tokens == [tokens[0]] * 2
    assert result.extras[0] == result.extras[1]


def test_rows_that_ask_for_nothing_bring_nothing_extra() -> None:
    assert execute(make_row(Draw(SamplingParams(), 6, 0), 0)).extras == {}
    assert execute() == StepTokens(tokens=[])
